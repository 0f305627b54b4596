"""What a plan that samples on its device is told of a row, and says: the words of a record, and the buffers."""

RECORDS, SAMPLED = "records", "sampled"  # buffers of `io`, int32 [rows, RECORD] and [rows, 2]

# Places of a record's words. Shares of 2^64 (`top_p`, 0 for none, and the uniform number) have two, low word first.
KIND = 0  # one of the next three
HOST, GREEDY, DRAWN = 0, 1, 2
SEQUENCE = 1  # row of the page table
LENGTH = 2  # tokens of the sequence, all in the cache
PROMPT = 3  # how many of them are the prompt
EDITS = 4  # how many edits follow
TOP_K = 5
REPETITION, PRESENCE, FREQUENCY, TEMPERATURE, MIN_P = 6, 7, 8, 9, 10  # f32
TOP_P, UNIFORM = 12, 14
LIST = 16  # of edits, two words each: a token, and the f32 that is added to its logit; -inf forbids it
MOST_EDITS = 24
RECORD = LIST + 2 * MOST_EDITS
