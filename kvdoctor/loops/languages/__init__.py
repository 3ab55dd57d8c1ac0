"""The languages that loops are written in, one folder each: its templates, and how it writes names and values."""
