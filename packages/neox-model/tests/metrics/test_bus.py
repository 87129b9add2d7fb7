import torch

from neox_model.metrics.bus import read_back


def test_numbers_of_several_devices_and_types_are_read_in_their_order(monkeypatch):
    stacked = []
    stack = torch.stack

    def one_device(tensors):
        stacked.append({tensor.device for tensor in tensors})
        return stack(tensors)

    monkeypatch.setattr(torch, "stack", one_device)
    values = [torch.tensor(1.5), None, 2, torch.tensor([3], dtype=torch.int64), torch.tensor(True), 0.5]
    assert read_back(values) == [1.5, None, 2, 3.0, 1.0, 0.5]
    assert stacked == [{torch.device("cpu")}]
    assert read_back([]) == []
