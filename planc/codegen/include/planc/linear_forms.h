// How linear layers find their weights: panels of them, the rows that multiply a format, scales, and what joins columns.
#pragma once
#include "planc/blocking.h"
#include "planc/input_rows.h"
#include "planc/tile.h"
#include "planc/weights.h"

namespace planc {

namespace detail {

// A panel is one row tile's weights already widened: [k][NV][16] f32.
template <int NV>
struct Panel : PackedF32 {
    static constexpr int STRIDE = NV * LINE_BYTES;
    static constexpr bool PREFETCH = false;
};
template <class Format, bool FROM_MEMORY = true>
struct Packed : Format {
    static constexpr int STRIDE = GROUP_BYTES;
    static constexpr bool PREFETCH = FROM_MEMORY;
};
// The same as rows of a Form multiply them: [k / GROUP][step][NV] lines.
template <class Form, int NV>
struct PanelOfDots : Plain {
    static constexpr int GROUP = Form::GROUP, STRIDE = Form::STEPS * NV * LINE_BYTES;
    static constexpr bool PREFETCH = false;
    template <int P>
    static PLANC_INLINE VecI dots(const char* line) {
        return load_int(line + P * NV * LINE_BYTES);
    }
};

constexpr int PANEL_COLUMNS = PANEL_VECS * LANES;

// The panel of rows of a Form.
template <class Form, int NV, bool DOTS = Form::DOTS>
struct PanelOf {
    using Source = Panel<NV>;
};
template <class Form, int NV>
struct PanelOf<Form, NV, true> {
    using Source = PanelOfDots<Form, NV>;
};

// How rows are kept that multiply a format.
template <class Format>
using FormOf = std::conditional_t<
    Format::INTEGERS, std::conditional_t<BYTE_DOTS, AsBytes, AsHalves>,
    std::conditional_t<BYTE_DOTS && Format::DIGITS, AsDigits,
                       std::conditional_t<BF16_DOTS && !std::is_same_v<Format, PackedF32>, AsBf16,
                                          std::conditional_t<std::is_same_v<typename Format::X, float>, AsTheyLie, AsFloats>>>>;
template <class Base, class Config, class Format = typename Config::Format, class Form = FormOf<Format>>
using RowsOf = std::conditional_t<std::is_same_v<Form, AsDigits>, DigitRows<Base, Config::K, Format, most_k<Config, Form>()>,
                                  KeptRows<Base, Config::K, Form, most_k<Config, Form>(), Format>>;

// Elements of scales and zero points: f32, or what a Config says.
template <class Config>
struct ScaleOf {
    using Type = float;
};
template <class Config>
    requires requires { typename Config::Scale; }
struct ScaleOf<Config> {
    using Type = typename Config::Scale;
};
}  // namespace detail

// Where the parameters of a linear layer are: weight packed, scale and zeros [N] or [K/SCALE_K, N], bias f32 [N]; null where
// the layer has none.
template <class Config>
struct LinearWeights {
    using Scale = typename detail::ScaleOf<Config>::Type;
    const char* weight;
    const Scale *scale, *zeros;
    const float* bias;
};

namespace detail {
// What joins two columns of y, if a Config has it.
template <class Config>
struct GateOf {
    static constexpr bool GATED = false;
    static constexpr int COLUMNS = Config::N;  // of y
};
template <class Config>
    requires requires { typename Config::Gate; }
struct GateOf<Config> {
    static constexpr bool GATED = true;
    static constexpr int COLUMNS = Config::N / 2;
    static PLANC_INLINE Vec apply(Vec gate, Vec up) { return Config::Gate::apply(gate, up); }
};
}  // namespace detail

}  // namespace planc
