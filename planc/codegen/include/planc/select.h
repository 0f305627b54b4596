// Picking along the last axis: the best k in order, elements by index, and writes by index.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>

#include "planc/rows.h"

namespace planc {

// The best COUNT of WIDTH elements, best first; of equals the lowest index first. A NaN is larger than every number.
template <int WIDTH, int COUNT, bool LARGEST>
class TopK {
    static constexpr int FEW = 64;  // up to here the best so far stay sorted while all are met once

    static bool better(float a, float b) {
        if (std::isnan(a) || std::isnan(b)) return std::isnan(LARGEST ? a : b) && !std::isnan(LARGEST ? b : a);
        return LARGEST ? a > b : a < b;
    }

    static void insert_all(const float* x, float* values, int32_t* index) {
        int have = 0;
        for (int i = 0; i < WIDTH; ++i) {
            if (have == COUNT && !better(x[i], values[COUNT - 1])) continue;
            int at = have < COUNT ? have++ : COUNT - 1;
            for (; at > 0 && better(x[i], values[at - 1]); --at) {
                values[at] = values[at - 1];
                index[at] = index[at - 1];
            }
            values[at] = x[i];
            index[at] = i;
        }
    }

    static void sort_all(const float* x, float* values, int32_t* index) {
        static thread_local int32_t order[WIDTH];
        std::iota(order, order + WIDTH, 0);
        std::partial_sort(order, order + COUNT, order + WIDTH,
                          [&](int32_t a, int32_t b) { return better(x[a], x[b]) || (!better(x[b], x[a]) && a < b); });
        for (int j = 0; j < COUNT; ++j) {
            values[j] = x[order[j]];
            index[j] = order[j];
        }
    }

   public:
    static void row(const float* x, float* values, int32_t* index) {
        if constexpr (COUNT <= FEW) {
            insert_all(x, values, index);
        } else {
            sort_all(x, values, index);
        }
    }
};

template <class Op, class Shape, class Out, class X>
void top_rows(int rows, int thread, int threads, const float* x, float* values, int32_t* index) {
    for_each_inner<Shape>(rows, thread, threads, [&](const auto& place) {
        Op::row(x + X::at(place), values + Out::at(place), index + Out::at(place));
    });
}

// y[.., j] = x[.., index[.., j]] for WIDTH elements of x and COUNT indices; one outside of the axis gives 0.
template <int WIDTH, int COUNT, class Shape, class Out, class X, class Index, class Element>
void gather_rows(int rows, int thread, int threads, const Element* x, const int32_t* index, Element* y) {
    for_each_inner<Shape>(rows, thread, threads, [&](const auto& place) {
        const Element* from = x + X::at(place);
        const int32_t* at = index + Index::at(place);
        Element* to = y + Out::at(place);
        for (int j = 0; j < COUNT; ++j) to[j] = uint32_t(at[j]) < uint32_t(WIDTH) ? from[at[j]] : Element(0);
    });
}

// A copy of x with y[.., index[.., j]] = (ADD: +=) source(place, j), j ascending; an index outside writes nothing.
template <int WIDTH, int COUNT, bool ADD, class Shape, class Out, class X, class Index, class Source>
void scatter_rows(int rows, int thread, int threads, const float* x, const int32_t* index, float* y, Source source) {
    for_each_inner<Shape>(rows, thread, threads, [&](const auto& place) {
        const int32_t* at = index + Index::at(place);
        float* to = y + Out::at(place);
        std::memcpy(to, x + X::at(place), sizeof(float) * WIDTH);
        for (int j = 0; j < COUNT; ++j) {
            if (uint32_t(at[j]) >= uint32_t(WIDTH)) continue;
            to[at[j]] = ADD ? to[at[j]] + source(place, j) : source(place, j);
        }
    });
}

}  // namespace planc
