"""What a decoder layer does beside products and attention."""
