"""Which wheels `tools/dist.sh` builds with which Python. Installing real ones: test_wheels.py."""

import shutil

import pytest

from support.launches import shell
from support.refusals import shows
from support.sources import ROOT

# Stand for the environments: pip writes wheels whose names state the Python, and zipfile lists an extension.
ENVIRONMENT = """\
#!/usr/bin/env bash
mkdir -p .venvs/data-$2/bin
printf '#!/usr/bin/env bash\\nVERSION=%s tools/python.sh "$@"\\n' "$2" > .venvs/data-$2/bin/python
chmod +x .venvs/data-$2/bin/python
"""
PYTHON = """\
#!/usr/bin/env bash
[ "$2" = pip ] || { echo neox_data/_native.so && exit; }
while [ "$1" != --wheel-dir ]; do shift; done
for folder in "${@:3}"; do
    name=$(basename "$folder")
    touch "$2/${name//-/_}-built_with_$VERSION.whl"
done
"""


@pytest.mark.parametrize(
    ("prebuild", "compiled"), [("", ["data"]), ("0", ["data"]), ("1", ["data", "kernels"])]
)
def test_compiled_wheels_are_built_with_each_python(tmp_path, prebuild, compiled):
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/dist.sh", tmp_path / "tools/dist.sh")
    for name, text in (("environment.sh", ENVIRONMENT), ("python.sh", PYTHON)):
        (tmp_path / "tools" / name).write_text(text)
        (tmp_path / "tools" / name).chmod(0o755)
    for name in ("launcher", "data", "kernels", "model"):
        (tmp_path / f"packages/neox-{name}").mkdir(parents=True)
        (tmp_path / f"packages/neox-{name}/README.md").touch()
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    done = shell(tmp_path, "tools/dist.sh", seconds=60, PYTHONS="3.11 3.12", NEOX_KERNELS_PREBUILD=prebuild)
    assert done.returncode == 0, done.stderr
    for version in ("3.11", "3.12"):
        # Its environment may take minutes.
        assert shows(done.stdout, f"Python {version}", f".venvs/data-{version}")
        built = {path.name for path in (tmp_path / "dist" / version).iterdir()}
        assert built == {
            f"neox_{name}-built_with_{version if name in compiled else '3.11'}.whl"
            for name in ("launcher", "data", "kernels", "model")
        }
    assert (tmp_path / "dist/constraints.txt").read_text() == "torch==2.13.0\n"
