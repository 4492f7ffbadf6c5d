"""What several formats leave to be inferred from the spans of one rank.

launches            which call launched a kernel, and within which range
steps, repetition   where steps begin and end, by marks or by what repeats
"""
