"""Repair as a product: `cplus repair`, and the last step of `cplus adapt --repair`."""
