// How a row's token is to be chosen: the words of a record, which the runtime writes.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "planc/abi.h"

namespace planc {

// Places of a record's words; plans/sampling.py has the same.
struct Record {
    enum Place { KIND, SEQUENCE, LENGTH, PROMPT, EDITS, TOP_K, REPETITION, PRESENCE, FREQUENCY, TEMPERATURE, MIN_P };
    enum WidePlace { TOP_P = 12, UNIFORM = 14, LIST = 16, WORDS = 64 };
    enum Kind : int32_t { HOST, GREEDY, DRAWN };

    const int32_t* words;

    int32_t operator[](int place) const { return words[place]; }
    float real(int place) const {
        float value;
        std::memcpy(&value, words + place, sizeof value);
        return value;
    }
    // A share of 2^64, low word first.
    double share(int place) const {
        uint64_t value;
        std::memcpy(&value, words + place, sizeof value);
        return std::ldexp(double(value), -64);
    }
};

// Whether each row wants its best logit as it is: greedy, with nothing that changes logits.
inline bool all_best(const planc_choice& choice, int rows) {
    for (int row = 0; row < rows; ++row) {
        const Record r = {choice.records + int64_t(row) * Record::WORDS};
        const bool as_it_is = r.real(Record::REPETITION) == 1.0f && r.real(Record::PRESENCE) == 0.0f && r.real(Record::FREQUENCY) == 0.0f;
        if (r[Record::KIND] != Record::GREEDY || r[Record::EDITS] != 0 || !as_it_is) return false;
    }
    return true;
}

}  // namespace planc
