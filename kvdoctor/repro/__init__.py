"""A reproducer to send: the smallest weight-free model and script that show a failure.

A candidate is a set of files and a script. What makes it smaller is in `surgery`, `spine`, `weights` and `sizes`;
`witness` tells whether a candidate still shows the failure, and `reducing` goes from small candidates to larger ones
until one does. `writing` puts it on disk.
"""
