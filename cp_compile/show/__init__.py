"""What a rewritten program looks like: as lines of Python, as figures, as a picture.

Everything here reads graphs and changes none. ``listing`` is what the other files build on.
"""
