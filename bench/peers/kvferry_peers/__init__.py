"""Other transfer engines, driven by `kvferry bench --peers`: one process per engine and role."""
