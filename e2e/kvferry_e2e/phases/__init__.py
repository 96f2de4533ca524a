"""The phases of the run: each takes live instances and adds lines to the report."""
