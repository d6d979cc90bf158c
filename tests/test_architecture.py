"""`docs/files.md` has a line for every file where it lies, and no other: it is what `make files-page` makes."""

from tests.files_page import PAGE, listed_files, page


def test_the_page_of_files_is_what_their_first_sentences_make() -> None:
    assert PAGE.read_text() == page(listed_files()), "run `make files-page`"
