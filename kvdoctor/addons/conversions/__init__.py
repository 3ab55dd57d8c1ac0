"""`convert`: a healthy decoder in another form, proved against the original.

`graphs` has a file for each conversion of one graph, `layouts` one for each way in which graphs are split over files.
A conversion is proved by running copy and original side by side, in `worker/`. It builds on the repair of the core and
must not know another add-on.
"""

TAKES = {"convert": ("run", "download")}
"""What its commands take of the core's options (`kvdoctor.options`)."""
