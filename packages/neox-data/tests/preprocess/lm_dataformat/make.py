"""Write the files of this folder with lm_dataformat, and what it reads from them, to expected.json.

    python -m venv env && env/bin/pip install lm_dataformat==0.0.20 && env/bin/python make.py

The tests do not run this. They compare what neox-data reads from the files with expected.json.
"""

import gzip
import io
import json
import lzma
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import lm_dataformat
import zstandard

FOLDER = Path(__file__).parent
TEXTS = [
    "one",
    "",
    'two\nlines "quoted" \\ [brackets], {braces}',
    "caf\u00e9 \u4f60\u597d \U0001f680",
    "last\r\n",
]


def written(archive: object, folder: str, ending: str, **words: str) -> bytes:
    """Return the file that one of the library's archives writes."""
    for text in TEXTS:
        archive.add_data(text)
    archive.commit(**words)
    return next((FOLDER / folder).glob(f"*{ending}")).read_bytes()


def tar_of(members: dict[str, bytes]) -> bytes:
    """Return a tar archive."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def zip_of(members: dict[str, bytes]) -> bytes:
    """Return a zip archive."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return data.getvalue()


def main() -> None:
    """Write all files."""
    scratch = FOLDER / "scratch"
    jsonl_zst = written(
        lm_dataformat.Archive(str(scratch / "a")), "scratch/a", ".jsonl.zst", archive_name="x"
    )
    members = {
        "a.txt": b"first\r\n",
        "folder/b": b"second",
        "c.py": "caf\u00e9 = 1\n".encode(),
        "empty.txt": b"",
    }
    lines = "one\n\ncaf\u00e9\r\nlast".encode()
    paragraphs = json.dumps({"text": ["two", "paragraphs"], "meta": {}}).encode() + b"\n"
    files = {
        "archive.jsonl.zst": jsonl_zst,
        "dat.dat.zst": written(
            lm_dataformat.DatArchive(str(scratch / "b")), "scratch/b", ".dat.zst", archive_name="x"
        ),
        "array.json.zst": written(lm_dataformat.JSONArchive(str(scratch / "c")), "scratch/c", ".json.zst"),
        "lines.jsonl": b'{"text": "one"}\n"bare"\n' + paragraphs,
        "archives.jsonl.zst.tar": tar_of(
            {"data_0.jsonl.zst": jsonl_zst, "data_1.jsonl.zst": zstandard.compress(paragraphs)}
        ),
        "text.txt": "one\r\ntwo\rthree\ncaf\u00e9".encode(),
        "lines.txt.gz": gzip.compress(lines, mtime=0),
        "strings.json.gz": gzip.compress(b'"one"\n"caf\\u00e9"\n', mtime=0),
        "texts.tar.gz": gzip.compress(tar_of(members), mtime=0),
        "texts.zip": zip_of(members),
        "urlsf_subset00_data.xz": lzma.compress(tar_of({"1.txt": b"first\r\n", "2.txt": b"second"})),
    }
    expected = {}
    for name, data in files.items():
        (FOLDER / name).write_bytes(data)
        reader = lm_dataformat.Reader(str(FOLDER / name))
        # stream_data() of 0.0.20 ends with a NameError for this kind.
        texts = reader.read_jsonl_tar(str(FOLDER / name)) if name.endswith(".tar") else reader.stream_data()
        expected[name] = list(texts)
    found = {"lm_dataformat": version("lm_dataformat"), "texts": expected}
    (FOLDER / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
