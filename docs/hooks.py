"""For mkdocs: a link from a page to a file outside docs/ becomes the file's path, for the site does not have it."""

import re


def on_page_markdown(markdown: str, page, **_) -> str:
    if page.file.src_uri.count("/"):
        return markdown
    return re.sub(r"\[([^]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2`)", markdown)
