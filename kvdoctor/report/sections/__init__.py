"""The sections of a report, each made once as blocks: the next one is written here, and every format has it.

`whole.list_sections` is their order. A section says what the report document holds, and knows no format.
"""
