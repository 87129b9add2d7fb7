import threading

import numpy as np

from neox_data.preprocess.encode import batched, encode_batch, encode_batches
from neox_data.preprocess.read import Document
from neox_data.tokenizers.char_level import CharLevelTokenizer
from support.refusals import refused


def document(text: str, num_bytes: int = 2_400_000) -> Document:
    return Document((text,), num_bytes)


def encode(documents, *, end_of_document: int | None = None, workers: int = 2, encoder=None):
    encoder = encoder or CharLevelTokenizer().encode_flat
    return encode_batches(
        documents,
        lambda batch: encode_batch(batch, encoder, np.dtype("u2"), end_of_document),
        workers=workers,
        batch_bytes=1 << 22,
    )


def test_batches_are_bounded_by_size() -> None:
    assert [len(batch) for batch in batched([document("a")] * 5, 1 << 22)] == [2, 2, 1]
    assert [len(batch) for batch in batched([document("a", 1)] * 20_000, 1 << 22, 1 << 14)] == [16_384, 3_616]


def test_tokens_come_in_order_with_their_ends_and_without_empty_documents() -> None:
    documents = [document(text)._replace(offset=place) for place, text in enumerate(["ab", "", "c"])]
    batches = list(encode(documents, end_of_document=0))
    tokens, sizes, _, offsets = (
        np.concatenate(parts) for parts in zip(*(batch.columns[0] for batch in batches), strict=True)
    )
    assert tokens.tolist() == [97, 98, 0, 99, 0]
    assert tokens.dtype == np.uint16
    assert sizes.tolist() == [3, 2]
    assert offsets.tolist() == [0, 2]
    assert sum(batch.num_documents for batch in batches) == 3


def test_only_a_few_batches_are_read_ahead() -> None:
    read = []

    def documents():
        for number in range(100):
            read.append(number)
            yield document("a", 1 << 22)

    batches = encode(documents())
    next(batches)
    assert len(read) == 3
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("encode")]


def test_an_error_of_a_worker_surfaces() -> None:
    class Broken(CharLevelTokenizer):
        def encode(self, text: str) -> list[int]:
            raise RuntimeError(f"cannot encode {text}")

    with refused(RuntimeError, "cannot encode x"):
        list(encode([document("x")], encoder=Broken().encode_flat))
