"""Reports of measurements as tables on the terminal and as HTML pages with plots."""
