//! The KV cache of well-known models: bytes of a token in a layer.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Content that a layer caches per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attention {
    /// Keys and values for each KV head (multi-head when there are as many as query heads).
    Grouped { kv_heads: u32, head_dim: u32 },
    /// Multi-head latent attention: one compressed latent and one rotary part for all heads.
    Latent { latent: u32, rotary: u32 },
}

/// A model as far as its KV cache is concerned.
#[derive(Debug, Clone, Copy)]
pub struct Model {
    pub(crate) name: &'static str,
    pub(crate) layers: u32,
    attention: Attention,
}

const fn grouped(name: &'static str, layers: u32, kv_heads: u32, head_dim: u32) -> Model {
    Model { name, layers, attention: Attention::Grouped { kv_heads, head_dim } }
}

const fn latent(name: &'static str, layers: u32) -> Model {
    Model { name, layers, attention: Attention::Latent { latent: 512, rotary: 64 } }
}

/// Known models, from their published configurations (`num_hidden_layers`, `num_key_value_heads`, `head_dim`,
/// `kv_lora_rank`, `qk_rope_head_dim`).
const MODELS: &[Model] = &[
    grouped("opt-125m", 12, 12, 64),
    grouped("llama-3.2-1b", 16, 8, 64),
    grouped("llama-3.1-8b", 32, 8, 128),
    grouped("llama-3.1-70b", 80, 8, 128),
    grouped("llama-3.1-405b", 126, 8, 128),
    grouped("qwen2.5-7b", 28, 4, 128),
    grouped("qwen3-8b", 36, 8, 128),
    grouped("qwen3-32b", 64, 8, 128),
    grouped("qwen3-235b-a22b", 94, 4, 128),
    grouped("mistral-7b", 32, 8, 128),
    grouped("mixtral-8x7b", 32, 8, 128),
    grouped("gemma-2-9b", 42, 8, 256),
    grouped("phi-4", 40, 10, 128),
    grouped("gpt-oss-120b", 36, 8, 64),
    latent("deepseek-v2-lite", 27),
    latent("deepseek-v3", 61),
    latent("kimi-k2", 61),
];

impl Model {
    /// Finds a model by its name, in any case.
    ///
    /// # Errors
    /// A sentence that lists the names.
    pub fn find(name: &str) -> Result<Model, String> {
        MODELS.iter().find(|model| model.name.eq_ignore_ascii_case(name)).copied().ok_or_else(
            || {
                let known: Vec<&str> = MODELS.iter().map(|model| model.name).collect();
                format!("there is no model `{name}`; known are {}", known.join(", "))
            },
        )
    }

    /// Numbers cached per token and layer.
    fn elements(self) -> u64 {
        match self.attention {
            Attention::Grouped { kv_heads, head_dim } => {
                2 * u64::from(kv_heads) * u64::from(head_dim)
            }
            Attention::Latent { latent, rotary } => u64::from(latent) + u64::from(rotary),
        }
    }

    /// Bytes of one block of one layer.
    pub(crate) fn page_bytes(self, block_tokens: u32, dtype: Dtype) -> u64 {
        self.elements() * dtype.bytes() * u64::from(block_tokens)
    }
}

/// The type of a number of the cache.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    Bf16,
    Fp16,
    Fp8,
    Fp32,
}

impl Dtype {
    fn bytes(self) -> u64 {
        match self {
            Dtype::Fp8 => 1,
            Dtype::Bf16 | Dtype::Fp16 => 2,
            Dtype::Fp32 => 4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of one token in all layers.
    fn token_bytes(name: &str) -> u64 {
        let model = Model::find(name).expect(name);
        model.page_bytes(1, Dtype::Bf16) * u64::from(model.layers)
    }

    #[test]
    fn bytes_per_token_are_the_published_ones() {
        assert_eq!(token_bytes("llama-3.1-8b"), 128 << 10);
        assert_eq!(token_bytes("llama-3.1-70b"), 320 << 10);
        assert_eq!(token_bytes("llama-3.1-405b"), 504 << 10);
        assert_eq!(token_bytes("deepseek-v3"), 61 * 576 * 2);
        assert_eq!(token_bytes("opt-125m"), 36 << 10);
    }

    #[test]
    fn a_block_of_sixteen_tokens_of_llama_is_64_kib_per_layer() {
        let model = Model::find("Llama-3.1-8B").expect("any case");
        assert_eq!(model.page_bytes(16, Dtype::Bf16), 64 << 10);
        assert_eq!(model.page_bytes(16, Dtype::Fp8), 32 << 10);
        assert_eq!(Model::find("deepseek-v3").expect("known").page_bytes(64, Dtype::Fp8), 36 << 10);
    }

    #[test]
    fn every_model_is_found_by_its_name_and_an_unknown_one_lists_them() {
        for model in MODELS {
            assert_eq!(Model::find(model.name).expect("listed").name, model.name);
        }
        let refusal = Model::find("gpt-5").expect_err("unknown");
        assert!(refusal.contains("gpt-5") && refusal.contains("deepseek-v3"), "{refusal}");
    }
}
