"""The rules of the RedCoast paper, for a tree without a function that uses it."""
