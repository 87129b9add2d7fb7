from neox_model.train.about import describe_size


def test_parameters_that_are_not_trained_are_told_apart():
    whole = [((1_000, 64), False), ((64, 8), True), ((8,), True)]
    assert describe_size(whole) == "64,520 parameters (520 of them are trained)"
    assert describe_size(whole[1:]) == "520 parameters"
