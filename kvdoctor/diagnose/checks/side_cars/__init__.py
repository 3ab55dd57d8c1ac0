"""The config files of a model, compared with its graph: one module for each kind of file, and what they share.

Not checks: the check config-disagrees asks these modules, and so does the repair that corrects a config.
"""
