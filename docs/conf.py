"""Settings of Sphinx for `make docs`. The pages are plain Markdown and need no extension of their own."""

project = "trainer"
author = "the authors of trainer"
copyright = author
extensions = ["myst_parser"]
exclude_patterns = ["build"]
nitpicky = True
myst_heading_anchors = 3

html_theme = "furo"
html_title = "trainer"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_static_path = ["style"]
html_css_files = ["tables.css"]
smartquotes_action = "qe"  # dashes stay as typed: --json is a flag
