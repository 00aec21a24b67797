"""Export of heads for other programs: the formats that `medusa export` can write."""

FORMATS = {
    "original-v1": "published:write_original",  # FasterDecoding's package medusa-llm
    "tgi": "published:write_tgi",  # Text Generation Inference, LoRAX
    "vllm": "vllm:write_vllm",  # Medusa heads (vLLM up to 0.32), the layer of EAGLE-3, and block drafters
    "sglang": "eagle3:write_sglang",  # the layer of EAGLE-3, and block drafters
    "speculators": "eagle3:write_speculators",  # the same, in the format of vLLM's library speculators
    "z-lab": "dflash:write_z_lab",  # block drafters, as z-lab and DeepSpec publish them
    "llama.cpp": "eagle3:write_llama_cpp",  # the layer of EAGLE-3, as input of llama.cpp's converter
    "hub": "repository:write",  # transformers without this package, through custom_generate
}
"""The name of each format, with the module and the function that write it."""
REMOVED = dict.fromkeys(
    ("tensorrt-llm", "modelopt"),
    "TensorRT-LLM has deleted the engines that ran Medusa heads; train heads.kind=eagle heads.block=gated for vLLM",
)
REMOVED["ollama"] = "Ollama loads no heads; llama.cpp, on which it is built, does: --to llama.cpp"
"""Formats that this version does not write, with the reason."""
WRITTEN = (
    *("config.json", "provenance.json", "medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors"),
    *(
        "mask_embedding.pt",
        "README.md",
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
        ".gitattributes",
    ),
)
"""All files that exports write; a folder with others is not replaced."""
MARK = ".medusa-export"
"""A file with the name of the format, by which an export is known; trained heads and models have the other names."""
