import numpy as np

from neox_data.documents import document_ids, position_ids

# 9 ends a document.
TOKENS = np.array([[5, 9, 6, 7, 9, 9, 8], [9, 1, 2, 3, 4, 5, 9]])


def test_a_document_number_changes_after_the_token_that_ends_it() -> None:
    assert document_ids(TOKENS, 9).tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]


def test_positions_start_again_after_the_token_that_ends_a_document() -> None:
    assert position_ids(TOKENS, 9).tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]


def test_positions_run_through_the_row_without_resets() -> None:
    assert position_ids(TOKENS).tolist() == [list(range(7))] * 2


def test_dtypes_match_the_model_input() -> None:
    assert (
        document_ids(TOKENS, 9).dtype
        == position_ids(TOKENS, 9).dtype
        == position_ids(TOKENS).dtype
        == np.int64
    )
