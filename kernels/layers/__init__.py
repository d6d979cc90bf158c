"""Operations of a decoder layer other than matrix products and attention."""
