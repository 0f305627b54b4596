// How a product is cut: a Config's own numbers where its product was tuned, else those of the form of its rows, which suit
// caches of 32 KB (L1) and 1 MB (L2). They decide where sums happen and never change a bit.
//
// Config may have CHUNK_ROWS (rows that a panel serves), PANEL_FROM (rows from which on weights are unpacked in panels),
// PANEL_K (the most k of a panel) and TILE_ROWS (rows in registers).
#pragma once

namespace planc::detail {

template <class Config>
constexpr int chunk_rows() {
    if constexpr (requires { Config::CHUNK_ROWS; }) return Config::CHUNK_ROWS;
    return 192;  // they take 240 KB at most, within the L2 cache
}

template <class Config, class Form>
constexpr int panel_from() {
    if constexpr (requires { Config::PANEL_FROM; }) return Config::PANEL_FROM;
    return Form::PANEL_FROM;
}

template <class Config, class Form>
constexpr int most_k() {
    if constexpr (requires { Config::PANEL_K; }) return Config::PANEL_K;
    return Form::MOST_K;
}

template <class Config, class Form>
constexpr int tile_rows() {
    if constexpr (requires { Config::TILE_ROWS; }) return Config::TILE_ROWS;
    return Form::TILE_ROWS;
}

}  // namespace planc::detail
