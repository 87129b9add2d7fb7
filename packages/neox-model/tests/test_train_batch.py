import torch

from neox_model.train.batch import as_batch


def test_labels_are_the_next_tokens_and_all_count():
    batch = as_batch(torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]]))
    assert batch.tokens_BS.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert batch.labels_BS.tolist() == [[6, 7, 8], [2, 3, 4]]
    assert batch.loss_mask_BS.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_predictions_from_a_documents_end_can_be_left_out():
    batch = as_batch(torch.tensor([[5, 0, 7, 0]]), masked_out_token=0)
    assert batch.loss_mask_BS.tolist() == [[1, 0, 1]]
