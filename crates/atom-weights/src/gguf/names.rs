//! Names of tensors and types: ggml's on one side, the Hugging Face checkpoints' on the other.

use crate::tensor::DType;

/// Outside of the layers.
const GLOBAL: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// Within `blk.N.` and `model.layers.N.`, before `.weight` or `.bias`.
const LAYER: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// ggml's numbers for tensor types. Those that can be read carry their [`DType`].
const TYPES: [(u32, &str, Option<DType>); 34] = [
    (0, "F32", Some(DType::F32)),
    (1, "F16", Some(DType::F16)),
    (2, "Q4_0", Some(DType::Q4_0)),
    (3, "Q4_1", Some(DType::Q4_1)),
    (6, "Q5_0", None),
    (7, "Q5_1", None),
    (8, "Q8_0", Some(DType::Q8_0)),
    (9, "Q8_1", None),
    (10, "Q2_K", None),
    (11, "Q3_K", None),
    (12, "Q4_K", None),
    (13, "Q5_K", None),
    (14, "Q6_K", None),
    (15, "Q8_K", None),
    (16, "IQ2_XXS", None),
    (17, "IQ2_XS", None),
    (18, "IQ3_XXS", None),
    (19, "IQ1_S", None),
    (20, "IQ4_NL", None),
    (21, "IQ3_S", None),
    (22, "IQ2_S", None),
    (23, "IQ4_XS", None),
    (24, "I8", None),
    (25, "I16", None),
    (26, "I32", None),
    (27, "I64", None),
    (28, "F64", None),
    (29, "IQ1_M", None),
    (30, "BF16", Some(DType::BF16)),
    (34, "TQ1_0", None),
    (35, "TQ2_0", None),
    (39, "MXFP4", None),
    (40, "NVFP4", None),
    (41, "Q1_0", None),
];

/// `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`. `None` for names that no family
/// here has a use for.
pub(crate) fn hugging_face_name(gguf: &str) -> Option<String> {
    if let Some((_, name)) = GLOBAL.iter().find(|(name, _)| *name == gguf) {
        return Some((*name).to_owned());
    }
    let (layer, rest) = gguf.strip_prefix("blk.")?.split_once('.')?;
    let (module, leaf) = split_leaf(rest)?;
    let (_, name) = LAYER.iter().find(|(name, _)| *name == module)?;
    is_layer_number(layer).then(|| format!("model.layers.{layer}.{name}.{leaf}"))
}

/// The inverse of [`hugging_face_name`].
pub(crate) fn gguf_name(hugging_face: &str) -> Option<String> {
    if let Some((name, _)) = GLOBAL.iter().find(|(_, name)| *name == hugging_face) {
        return Some((*name).to_owned());
    }
    let (layer, rest) = hugging_face.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, leaf) = split_leaf(rest)?;
    let (name, _) = LAYER.iter().find(|(_, name)| *name == module)?;
    is_layer_number(layer).then(|| format!("blk.{layer}.{name}.{leaf}"))
}

/// The name of a tensor type and how to read it, if it can be read. `None` for an unknown number.
pub(crate) fn tensor_type(number: u32) -> Option<(&'static str, Option<DType>)> {
    TYPES.iter().find(|(known, _, _)| *known == number).map(|&(_, name, dtype)| (name, dtype))
}

/// ggml's number for a type.
pub(crate) fn type_number(dtype: DType) -> u32 {
    let found = TYPES.iter().find(|(_, _, known)| *known == Some(dtype));
    found.expect("every DType is in the table").0
}

fn split_leaf(name: &str) -> Option<(&str, &str)> {
    name.rsplit_once('.').filter(|(_, leaf)| matches!(*leaf, "weight" | "bias"))
}

/// Written as Rust writes numbers: "07" would be a second name of layer 7.
fn is_layer_number(text: &str) -> bool {
    text.parse::<u32>().is_ok_and(|number| number.to_string() == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_translate_both_ways() {
        for (gguf, hugging_face) in [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("output.weight", "lm_head.weight"),
            ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
            ("blk.7.attn_q.weight", "model.layers.7.self_attn.q_proj.weight"),
            ("blk.7.attn_q.bias", "model.layers.7.self_attn.q_proj.bias"),
            ("blk.12.attn_k_norm.weight", "model.layers.12.self_attn.k_norm.weight"),
            ("blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight"),
            ("blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
            ("blk.1.ffn_down.bias", "model.layers.1.mlp.down_proj.bias"),
        ] {
            assert_eq!(hugging_face_name(gguf).as_deref(), Some(hugging_face));
            assert_eq!(gguf_name(hugging_face).as_deref(), Some(gguf));
        }
    }

    #[test]
    fn unknown_names_and_second_spellings_of_a_layer_are_left_alone() {
        for name in [
            "rope_freqs.weight",
            "blk.x.attn_q.weight",
            "blk.07.attn_q.weight",
            "blk.+7.attn_q.weight",
            "blk.7.attn_q",
            "blk.7.attn_q.scale",
            "blk.7.ffn_gate_exps.weight",
            "blk.99999999999.attn_q.weight",
            "",
        ] {
            assert_eq!(hugging_face_name(name), None, "{name}");
        }
    }

    #[test]
    fn every_readable_type_has_one_number() {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q4_1] {
            assert_eq!(tensor_type(type_number(dtype)), Some((&*format!("{dtype:?}"), Some(dtype))));
        }
        assert_eq!(tensor_type(4), None);
    }
}
