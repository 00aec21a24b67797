"""Reports of measurements as HTML pages, with plots."""
