"""CUDA templates, read through ``jinja2.PackageLoader``; see README in docs/templates.md."""
