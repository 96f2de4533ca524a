"""Other transfer engines, driven by `kvferry bench transfers --peers`: one process per engine and role."""
