"""From folders of texts to a tokenizer and a dataset, in one step: the command `neox-data prepare`."""
