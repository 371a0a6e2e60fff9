"""The first page of the site is README.md, its links as seen from docs/. mkdocs.yml names this."""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: dict) -> None:
    """Add index.md, made of README.md. mkdocs calls it when it has found the pages."""
    text = Path(config["config_file_path"]).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(r'(\]\(|src(?:set)?=")(?![a-z]+:|#)', r"\1../", text).replace("../docs/", "")
    # The site has a dark mode of its own, whatever the browser's.
    narrow = '<picture><source media="(max-width: 600px)" srcset="first-{0}-narrow.png">'
    both = [
        narrow.format(page) + rf"\1first-{page}.png#only-{page}\2</picture>"
        for page in ("dark", "light")
    ]
    picture = r'<picture>.*?(<img .*?src=").+?(".*?>)\s*</picture>'
    text = re.sub(picture, " ".join(both), text, count=1, flags=re.DOTALL)
    files.append(File.generated(config, "index.md", content=text))
