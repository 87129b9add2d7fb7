"""Print the packages that wheels require, each with its version, one a line.

    python gpu_minutes_requirements.py WHEELS CONSTRAINTS PRESENT...

WHEELS is a folder, CONSTRAINTS a file of versions, and PRESENT are names of packages that are left out.
"""

import json
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path


def plain(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by(wheel: Path) -> list[str]:
    """Return the requirements of a wheel without its extras."""
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line]


def main() -> int:
    """Print the packages and their versions, those that they require in turn included."""
    folder, constraints, *present = sys.argv[1:]
    wheels = sorted(Path(folder).glob("*.whl"))
    left_out = {plain(name) for name in present} | {plain(wheel.name.split("-")[0]) for wheel in wheels}
    direct = {line for wheel in wheels for line in required_by(wheel)}
    wanted = sorted(line for line in direct if plain(re.split(r"[^\w.-]", line)[0]) not in left_out)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--dry-run", "--ignore-installed"]
    report = subprocess.run(
        [*pip, "-c", constraints, "--report", "-", *wanted], stdout=subprocess.PIPE, check=True
    )
    found = [item["metadata"] for item in json.loads(report.stdout)["install"]]
    kept = (item for item in found if plain(item["name"]) not in left_out)
    sys.stdout.writelines(f"{item['name']}=={item['version']}\n" for item in kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
