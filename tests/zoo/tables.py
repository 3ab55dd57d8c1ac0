"""All rows of the zoo: the committed exports first, then what the exporters make, then the variants."""

import committed_table
import genai_table
import optimum_table
import transformers_table
import variants_table

SAMPLE = committed_table.SAMPLE
"""Rows that every test run sees."""

ROWS = (*committed_table.ROWS, *transformers_table.ROWS, *genai_table.ROWS, *optimum_table.ROWS, *variants_table.ROWS)
