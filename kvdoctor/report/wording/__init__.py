"""The sentences and table rows that all formats share: one module for each thing that a report describes.

Functions take parts of a report and return text, pairs of label and text, or a header with rows; where these stand on a
page is decided by the formats.
`summary` is quoted by the document itself, so it and its imports take `report.document` for types only.
"""
