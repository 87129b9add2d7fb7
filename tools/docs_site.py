"""The site of the documentation: `make docs-site` builds it into site/, and it can be read without a network.

    PYTHONPATH=tests .venvs/docs/bin/python tools/docs_site.py

The pages are the documents of the repository, in the same folders, and the files that they link. Their
navigation is docs/index.md. The reference of the Python interface is written from docstrings, which are read
without importing the packages.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from support.documents import DOCUMENTS, REPORTS, blocks_of
from support.sources import DISTRIBUTIONS, PACKAGES, ROOT

__all__ = ["anchors_of", "linked_files", "navigation", "problems_of_pages", "public_names", "without_code"]

SITE = ROOT / "site"
WORK = ROOT / ".site"
INDEX = "docs/index.md"
_LINK = re.compile(r"\[(?P<text>[^\]\[]+)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")
_HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
_FENCED = re.compile(r"^(```+).*?^\1[ ]*$", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(r"^## (.+)\n(?P<body>(?:(?!## ).*\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^- (.+)$", re.MULTILINE)
# Linked files that a browser shows or saves as they are; other files become pages with their text.
_AS_THEY_ARE = {".json", ".png", ".svg"}
# The theme's search is a worker, which browsers refuse in pages that are opened as files: run it in a frame.
_WORKERS = "assets/iframe-worker.js"
_WORKERS_SCRIPT = """\
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const scope = frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = scope.document.createElement("script");
      script.src = address;
      this.loaded = new Promise((done) => { script.onload = () => done(scope); });
      scope.document.body.append(script);
    }
    postMessage(data) {
      this.loaded.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
"""
_LANGUAGES = {".yml": "yaml", ".py": "python", ".sh": "bash", ".toml": "toml"}


def without_code(text: str) -> str:
    """Return a document without its fenced blocks."""
    return _FENCED.sub("", text)


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub and the site form them."""
    found: set[str] = set()
    for heading in _HEADING.findall(without_code(text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        assert anchor not in found, f"two headings have the anchor #{anchor}"
        found.add(anchor)
    return found


def _plain(path: Path) -> str:
    return Path(os.path.normpath(path)).relative_to(ROOT).as_posix()


def linked_files(document: Path) -> set[str]:
    """Return the files other than documents that a document links, by their paths from the root."""
    links = _LINK.finditer(document.read_text("utf-8"))
    targets = {target for link in links if (target := document.parent / link["target"]).is_file()}
    return {_plain(target) for target in targets} - {_plain(path) for path in DOCUMENTS}


def _page(document: Path) -> str:
    """Return a document with the links of the site: files are pages, folders their README.md."""

    def rewritten(link: re.Match[str]) -> str:
        target = document.parent / link["target"]
        if target.is_dir():
            readme = f"[{link['text']}]({link['target'].rstrip('/')}/README.md)"
            return readme if (target / "README.md").is_file() else link["text"]
        if _plain(target) in linked_files(document) and target.suffix not in _AS_THEY_ARE:
            return f"[{link['text']}]({link['target']}.md)"
        return link[0]

    return _LINK.sub(rewritten, document.read_text("utf-8"))


def _source_page(name: str) -> str:
    text = (ROOT / name).read_text("utf-8")
    language = _LANGUAGES.get(Path(name).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n`````{language}\n{text}\n`````\n"


def public_names(package: str) -> dict[str, dict[str, str]]:
    """Return what users import, by module: each name with the path of its definition.

    These are the names of the package's `__all__`, and what the Python examples of documents import from its
    modules.
    """
    path = ROOT / "packages" / DISTRIBUTIONS[package] / "src" / package / "__init__.py"
    tree = ast.parse(path.read_text("utf-8"))
    homes = {name: module for module, name in _imported(tree)}
    found: dict[str, dict[str, str]] = {package: {}}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found[package] = {name: f"{homes[name]}.{name}" for name in ast.literal_eval(node.value)}
    for document in DOCUMENTS:
        for block in blocks_of(document.read_text("utf-8")):
            imported = _imported(ast.parse(block.text)) if block.language == "python" else ()
            for module, name in imported:
                if module.startswith(f"{package}."):
                    found.setdefault(module, {})[name] = f"{module}.{name}"
    return {module: dict(sorted(found[module].items())) for module in sorted(found) if found[module]}


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def _reference_pages() -> dict[str, str]:
    """Return the pages about the packages that have public names."""
    pages = {}
    for package in PACKAGES:
        modules = public_names(package)
        entries = [
            f"## from {module} import\n\n" + "".join(f"::: {path}\n\n" for path in names.values())
            for module, names in modules.items()
        ]
        if entries:
            text = f"# {package}\n\nInstalled by `{DISTRIBUTIONS[package]}`.\n\n"
            pages[f"api/{package}.md"] = text + "".join(entries)
    return pages


def navigation() -> list[dict[str, object]]:
    """Return the navigation: the sections of docs/index.md, and the links in their lists."""
    text = (ROOT / INDEX).read_text("utf-8")
    found: list[dict[str, object]] = [{"NeoX": "README.md"}, {"Map": INDEX}]
    for section in _SECTION.finditer(text):
        links = [link for entry in _ENTRY.findall(section["body"]) for link in _LINK.finditer(entry)]
        if links:
            pages = [{link["text"]: _plain(ROOT / "docs" / link["target"])} for link in links]
            found.append({section[1]: pages})
    found.append({"Python interface": [{PurePosixPath(name).stem: name} for name in _reference_pages()]})
    return found


def _configuration(folder: Path) -> str:
    """Return the configuration of MkDocs; nothing is loaded from the internet."""
    checks = dict.fromkeys(("not_found", "anchors", "absolute_links", "unrecognized_links"), "warn")
    options = {
        "docstring_style": "google",
        "filters": ["!^_"],
        "heading_level": 3,
        "members_order": "source",
        "separate_signature": True,
        "show_root_full_path": False,
        "show_root_heading": True,
        "show_source": False,
        "show_symbol_type_heading": True,
    }
    paths = [str(ROOT / "packages" / name / "src") for name in sorted(set(DISTRIBUTIONS.values()))]
    features = ["content.code.copy", "navigation.sections", "navigation.tabs", "navigation.top", "toc.follow"]
    configuration = {
        "site_name": "NeoX",
        "docs_dir": str(folder / "pages"),
        "site_dir": str(folder / "site"),
        "use_directory_urls": False,
        "theme": {"name": "material", "font": False, "features": features},
        "extra": {"polyfills": [_WORKERS]},
        "plugins": [
            "search",
            "offline",
            {"mkdocstrings": {"handlers": {"python": {"paths": paths, "options": options}}}},
        ],
        "markdown_extensions": [
            "sane_lists",
            "tables",
            "pymdownx.highlight",
            "pymdownx.magiclink",
            "pymdownx.superfences",
            {"toc": {"permalink": True, "toc_depth": 3, "slugify": "SLUGIFY"}},
        ],
        "validation": {"nav": {"omitted_files": "warn", "not_found": "warn"}, "links": checks},
        "not_in_nav": "\n".join(
            [*(f"/{name}.md" for name in _all_linked_files()), *(f"/{_plain(path)}" for path in REPORTS)]
        ),
        "nav": navigation(),
    }
    # JSON is YAML, but a Python function in it requires a tag.
    slugify = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}"
    return json.dumps(configuration, indent=1).replace('"SLUGIFY"', slugify)


def _all_linked_files() -> list[str]:
    return sorted({name for document in DOCUMENTS for name in linked_files(document)})


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def _write_pages(pages: Path) -> None:
    for document in DOCUMENTS:
        _write(pages / document.relative_to(ROOT), _page(document))
    for name in _all_linked_files():
        if Path(name).suffix in _AS_THEY_ARE:
            (pages / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, pages / name)
        else:
            _write(pages / f"{name}.md", _source_page(name))
    for name, text in {**_reference_pages(), _WORKERS: _WORKERS_SCRIPT}.items():
        _write(pages / name, text)


class _Page(HTMLParser):
    """What a built page refers to, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the addresses and the anchor of a tag."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.loaded += [values["src"]] if "src" in values else []
        self.loaded += [values["href"]] if tag == "link" else []


def problems_of_pages(site: Path) -> list[str]:
    """Return links without a target, and what a page would load from the internet."""
    pages = {path.resolve(): _Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name}: loads {address}" for address in page.loaded if urlsplit(address).netloc]
        for address in {*page.links, *page.loaded}:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            if not target.exists():
                found.append(f"{name}: {address} does not exist")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: {address} has no such anchor")
    return sorted(found)


def main() -> None:
    """Build the site, and replace the previous one if nothing is wrong."""
    shutil.rmtree(WORK, ignore_errors=True)
    _write_pages(WORK / "pages")
    _write(WORK / "mkdocs.yml", _configuration(WORK))
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", str(WORK / "mkdocs.yml")]
    if subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode:
        sys.exit("the site was not built: see above")
    (WORK / "site/404.html").unlink()  # Only servers show it; its links are absolute.
    if problems := problems_of_pages(WORK / "site"):
        sys.exit("\n".join([*problems, "the site was not built"]))
    shutil.rmtree(SITE, ignore_errors=True)
    (WORK / "site").rename(SITE)
    shutil.rmtree(WORK)


if __name__ == "__main__":
    main()
