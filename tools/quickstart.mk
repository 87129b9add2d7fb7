# The commands of `make quickstart`, printed as you would type them (after `source .venv/bin/activate`).
# All output is in quickstart/. Existing files are complete, so make skips finished steps; the run resumes from
# its latest checkpoint. Delete quickstart/ to start again.
SHELL := bash
export PATH := $(CURDIR)/.venv/bin:$(PATH)

CONFIG := --config configs/quickstart.yml
# Without a GPU, two processes share the CPU.
ON_CPU := $(if $(wildcard /dev/nvidia[0-9]* /dev/dxg),,--set num-gpus=2)

.PHONY: quickstart
.DELETE_ON_ERROR:

quickstart: quickstart/data/stdlib_text_document.idx
	neox-launch $(CONFIG) $(ON_CPU)
	neox-report quickstart
	neox-launch generate $(CONFIG)
	@cat tools/quickstart.txt

quickstart/data/stdlib_text_document.idx: quickstart/stdlib.jsonl quickstart/tokenizer.json
	@mkdir -p quickstart/data
	preprocess_data --input quickstart/stdlib.jsonl --tokenizer-type HFTokenizer \
	  --vocab-file quickstart/tokenizer.json --append-eod --output-prefix quickstart/data/stdlib

# Not made again for a corpus that is: models require the tokenizer that they were trained with.
quickstart/tokenizer.json: | quickstart/stdlib.jsonl
	neox-data train-tokenizer --input quickstart/stdlib.jsonl --vocab-size 4096 --output quickstart/tokenizer.json

quickstart/stdlib.jsonl:
	neox-data stdlib-corpus quickstart/stdlib.jsonl
