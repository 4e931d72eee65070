"""Sphinx's settings. `python docs/book/build.py` calls it."""

from docutils import nodes

project = "epmoe: expert-parallel dispatch and combine"
author = copyright = "The epmoe authors"
extensions = ["myst_nb", "sphinx_copybutton"]
html_theme = "furo"
html_title = "epmoe"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_js_files = ["run_in_page.js"]
exclude_patterns = ["_build", "README.md"]
nb_execution_mode = "off"  # build.py has run the lessons, in their own files
myst_enable_extensions = []
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp"
suppress_warnings = ["mystnb.unknown_mime_type"]
nb_number_source_lines = True


def lines_of_the_file(app, doctree):
    """Number each piece of code as its file does, since reports cite the file's lines."""
    for cell in doctree.findall(nodes.container):
        first = (cell.get("cell_metadata") or {}).get("first_line")
        if first:
            for block in cell.findall(nodes.literal_block):
                if block.get("linenos"):
                    block["highlight_args"] = {"linenostart": first}


def setup(app):
    app.connect("doctree-read", lines_of_the_file)
