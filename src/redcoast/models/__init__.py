"""Model families: one file each, readable as the reference of its architecture."""
