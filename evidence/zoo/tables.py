"""All rows of the zoo: the committed exports first, then what the exporters make, then the variants."""

from evidence.zoo import committed_table, genai_table, optimum_table, transformers_table, variants_table

SAMPLE = committed_table.SAMPLE
"""Rows that every test run sees."""

ROWS = (*committed_table.ROWS, *transformers_table.ROWS, *genai_table.ROWS, *optimum_table.ROWS, *variants_table.ROWS)
