"""Time that is lost in some steps only.

find         the findings: which steps, what they cost, what to do
kinds        what each pause is, and which ranks work in it
regularity   how regularly they come
"""
