"""The models that people train, from the installed transformers, and the question asked of each: is it exact?"""
