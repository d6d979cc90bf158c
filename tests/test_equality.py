"""The comparison itself: it must see what differs, and forgive only near ties."""

import pytest

from tests.equality import assert_equal_greedy, compare_tokens

SURE = [1.0, 1.0, 1.0]
NEAR_TIE_SECOND = [1.0, 1e-5, 1.0]


def test_equal_tokens_are_counted() -> None:
    report = compare_tokens([[1, 2, 3], [4]], [SURE, [1.0]], [[1, 2, 3], [4]])
    assert (report.num_sequences, report.num_tokens, report.num_cuts) == (2, 4, 0)


@pytest.mark.parametrize("ours", [[1, 2, 9], [9, 2, 3], [1, 2], [1, 2, 3, 4]])
def test_a_different_missing_or_additional_token_fails(ours: list[int]) -> None:
    with pytest.raises(AssertionError, match="sequence 0"):
        compare_tokens([[1, 2, 3]], [SURE], [ours])


def test_what_follows_a_near_tie_is_not_compared() -> None:
    report = compare_tokens([[1, 2, 3]], [NEAR_TIE_SECOND], [[1, 9, 9]])
    assert (report.num_tokens, report.num_cuts) == (1, 1)
    with pytest.raises(AssertionError, match="position 0"):
        compare_tokens([[1, 2, 3]], [NEAR_TIE_SECOND], [[9, 2, 3]])


def test_one_cut_in_two_hundred_is_rare_enough_and_one_in_a_hundred_is_not() -> None:
    def compare(num_sequences: int) -> None:
        tokens, margins = [[1, 2, 3]] * num_sequences, [NEAR_TIE_SECOND, *[SURE] * (num_sequences - 1)]
        assert_equal_greedy(tokens, margins, tokens)

    compare(200)
    with pytest.raises(AssertionError, match="too many near ties"):
        compare(100)
