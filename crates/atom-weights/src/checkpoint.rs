//! A model's configuration and tensors, from whichever files.

use crate::config::{ModelConfig, from_gguf, from_json, gguf_architecture};
use crate::error::WeightsError;
use crate::experts;
use crate::family;
use crate::folder::{self, Contents};
use crate::fp8::Fp8Problem;
use crate::gguf::{Gguf, hugging_face_name};
use crate::synthetic::{self, Rule};
use crate::tensor::{DType, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A checkpoint with everything its model needs: each tensor of the family is there, of a type that
/// can be read and of the shape that the configuration says.
pub struct Checkpoint {
    origin: PathBuf,
    config: ModelConfig,
    source: Source,
    entries: Entries,
    unused: Vec<String>,
    unused_scales: usize,
    parameters: u64,
    total_bytes: u64,
}

/// Tensors by their Hugging Face names.
pub(crate) type Entries = BTreeMap<String, Entry>;

/// A tensor, or what is known of one that can't be read.
#[derive(Clone)]
pub(crate) enum Entry {
    Readable(Tensor),
    /// FP8 codes whose scales were not found (yet).
    Codes(Tensor, Fp8Problem),
    Unreadable {
        type_name: String,
        shape: Vec<usize>,
    },
}

enum Source {
    Gguf(Gguf),
    Folder {
        raw_config: Value,
    },
    Synthetic {
        raw_config: Value,
    },
    /// A folder's configuration and tokenizer with synthetic tensors.
    Dummy {
        raw_config: Value,
    },
}

impl Checkpoint {
    /// Opens a folder (config.json with `model.safetensors`, or with the shards that
    /// `model.safetensors.index.json` lists; or a single .gguf) or a GGUF file of any name.
    ///
    /// Files are mapped, not read: this takes milliseconds, and pages come in as they are used. They
    /// must not be truncated while the checkpoint or any of its tensors lives.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, WeightsError> {
        let path = path.as_ref();
        let kind =
            std::fs::metadata(path).map_err(|source| WeightsError::Io { path: path.to_owned(), source })?;
        if !kind.is_dir() {
            return Self::from_gguf(Gguf::open(path)?);
        }
        match folder::open(path)? {
            Contents::Gguf(file) => Self::from_gguf(Gguf::open(&file)?),
            Contents::Safetensors(folder) => {
                let source = Source::Folder { raw_config: folder.raw_config };
                let mut checkpoint = Self::assemble(path, folder.config, source, folder.entries)?;
                checkpoint.unused.extend(folder.unlisted);
                checkpoint.unused.sort();
                checkpoint.unused_scales = folder.unused_scales;
                Ok(checkpoint)
            }
        }
    }

    /// The model of a GGUF file that is parsed already.
    pub fn from_gguf(gguf: Gguf) -> Result<Self, WeightsError> {
        let architecture = gguf_architecture(&gguf)?;
        let mut entries = Entries::new();
        for record in gguf.tensors() {
            let name = hugging_face_name(&record.name, architecture).unwrap_or_else(|| record.name.clone());
            let shape = record.shape.clone();
            let entry = match &record.dtype {
                Ok(dtype) => Entry::Readable(Tensor::new(
                    *dtype,
                    shape,
                    Arc::clone(gguf.owner()),
                    record.start,
                    record.len,
                )),
                Err(type_name) => Entry::Unreadable { type_name: type_name.clone(), shape },
            };
            if entries.contains_key(&name) {
                let problem = format!("tensor {name} appears twice, under this and its GGUF name");
                return Err(WeightsError::damaged(gguf.origin(), problem));
            }
            entries.insert(name, entry);
        }
        let config = from_gguf(&gguf, architecture, &mut entries)?;
        let origin = gguf.origin().to_owned();
        let entries = experts::unify(entries, &config, &origin)?;
        Self::assemble(&origin, config, Source::Gguf(gguf), entries)
    }

    /// A model with random weights, made in memory: for tests against references that another program
    /// computes from the same weights, and for trying a shape without its files.
    ///
    /// Elements are f32 and a pure function of (`salt`, name of the tensor, index), by this rule:
    /// * `key` = [CRC-32 (zlib's) of the text `"{salt}/{name}"`, low 32 bits of `salt`];
    /// * for element `i`, words `w` = Philox 4x32-10 with counter [low and high 32 bits of `i / 2`, 0, 0];
    ///   `u1 = ((w[0] >> 8) + 1) / 2^24`, `u2 = (w[1] >> 8) / 2^24`, `r = sqrt(-2 ln u1)`, all in f64;
    ///   `x = r cos(2 pi u2)` if `i` is even, `r sin(2 pi u2)` if odd, rounded to f32;
    /// * the element is `offset + x * scale`, in f64 from that f32, rounded to f32; with `in` the last
    ///   dimension, `scale` is a quotient in f64:
    ///
    /// | tensor | offset | scale |
    /// |---|---|---|
    /// | `embed_tokens.weight` | 0 | 1, or 0.3 where the embeddings are tied |
    /// | `lm_head.weight` | 0 | 3 / sqrt(in) |
    /// | norm weights (all vectors but biases) | 1 | 0.1 |
    /// | biases | 0 | 0.1 |
    /// | `o_proj.weight`, `down_proj.weight` | 0 | 2 / sqrt(in) |
    /// | `mlp.gate.weight` (routers) | 0 | 1.5 / sqrt(in) |
    /// | other matrices | 0 | 1.2 / sqrt(in) |
    ///
    /// The scales keep logits spread out (a standard deviation of about 3), so that the likeliest token
    /// stands clear of the next; and the routers' (about 1.5), so that experts differ in weight and all
    /// of them are used. `e_score_correction_bias` is a bias.
    pub fn synthetic(config_json: &str, salt: u64) -> Result<Self, WeightsError> {
        let origin = Path::new("config.json of a synthetic model");
        let raw_config: Value = serde_json::from_str(config_json)
            .map_err(|source| WeightsError::Json { path: origin.to_owned(), source })?;
        let config = from_json(origin, &raw_config)?;
        let tensors = synthetic::tensors(&config, Rule::Synthetic(salt), DType::F32)?;
        let entries = tensors.into_iter().map(|(name, tensor)| (name, Entry::Readable(tensor))).collect();
        Self::assemble(origin, config, Source::Synthetic { raw_config }, entries)
    }

    /// The model that a folder's config.json describes, with synthetic weights in place of its own:
    /// nothing else of the folder is read, and no weights need to be there. Matrices are of type `dtype`
    /// (vectors, routers and rows that are not whole blocks are f32); elements are those of
    /// [`synthetic`](Self::synthetic) with salt 0, rounded, but for two scales that let rows choose experts as evenly as
    /// random numbers do, whatever their context, since a mixture's speed depends on how many it reads:
    ///
    /// | tensor | scale |
    /// |---|---|
    /// | `o_proj.weight` | 0.1 / sqrt(in), or 0.03 / sqrt(in) where the embeddings are tied |
    /// | `e_score_correction_bias` | 0.01 |
    pub fn dummy(folder: impl AsRef<Path>, dtype: DType) -> Result<Self, WeightsError> {
        let folder = folder.as_ref();
        let (raw_config, config) = folder::configuration(folder)?;
        let tensors = synthetic::tensors(&config, Rule::Dummy, dtype)?;
        let entries = tensors.into_iter().map(|(name, tensor)| (name, Entry::Readable(tensor))).collect();
        Self::assemble(folder, config, Source::Dummy { raw_config }, entries)
    }

    /// The same, but nothing is made before somebody asks for a tensor's bytes: for devices that make weights
    /// themselves by [`Tensor::recipe`]. So the model may be larger than the host's memory. If the configuration is one of
    /// FP8 weights and `dtype` is bf16, matrices of layers are codes with scales: all of one matrix are
    /// `5.769 / 448` of its elements' standard deviation, and codes are the nearest to the quotients.
    pub fn dummy_unmade(folder: impl AsRef<Path>, dtype: DType) -> Result<Self, WeightsError> {
        let folder = folder.as_ref();
        let (raw_config, config) = folder::configuration(folder)?;
        let tensors = synthetic::unmade(&config, Rule::Dummy, dtype);
        let entries = tensors.into_iter().map(|(name, tensor)| (name, Entry::Readable(tensor))).collect();
        Self::assemble(folder, config, Source::Dummy { raw_config }, entries)
    }

    /// The parsed configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// config.json as it is, for what is not in [`ModelConfig`]. `None` for GGUF.
    pub fn raw_config(&self) -> Option<&Value> {
        match &self.source {
            Source::Gguf(_) => None,
            Source::Folder { raw_config }
            | Source::Synthetic { raw_config }
            | Source::Dummy { raw_config } => Some(raw_config),
        }
    }

    /// The GGUF metadata, where the checkpoint is such a file.
    pub fn gguf(&self) -> Option<&Gguf> {
        match &self.source {
            Source::Gguf(gguf) => Some(gguf),
            Source::Folder { .. } | Source::Synthetic { .. } | Source::Dummy { .. } => None,
        }
    }

    /// The folder with tokenizer.json and its companions, where the checkpoint is one.
    pub fn folder(&self) -> Option<&Path> {
        match &self.source {
            Source::Folder { .. } | Source::Dummy { .. } => Some(&self.origin),
            Source::Gguf(_) | Source::Synthetic { .. } => None,
        }
    }

    /// The file or folder, for messages.
    pub fn origin(&self) -> &Path {
        &self.origin
    }

    /// A tensor by its Hugging Face name. A view: nothing is copied.
    ///
    /// Tensors that the family needs are always there. Of others it is an error if the name is unknown
    /// or the type can't be read.
    pub fn tensor(&self, name: &str) -> Result<Tensor, WeightsError> {
        let entry = self.entries.get(name).ok_or_else(|| WeightsError::NoSuchTensor {
            path: self.origin.clone(),
            name: name.to_owned(),
            count: self.entries.len(),
        })?;
        entry.clone().into_tensor(&self.origin, name)
    }

    /// Whether there is a tensor of that name, readable or not.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The names of all tensors, sorted, those that the model does not use included.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Tensors in the files that the model does not use: worth a warning.
    pub fn unused(&self) -> &[String] {
        &self.unused
    }

    /// Scales of activations and of an FP8 KV cache that came with FP8 weights. Nobody needs them: who quantises
    /// activations takes scales from the rows.
    pub fn unused_scales(&self) -> usize {
        self.unused_scales
    }

    /// Elements of all tensors that the model uses; a tied output matrix counts once.
    pub fn parameters(&self) -> u64 {
        self.parameters
    }

    /// Bytes of all tensors that the model uses, as stored.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// One line for people: "llama, 30 layers, 134.5 M parameters, Q4_1". The type is the one that most
    /// parameters are stored in.
    pub fn description(&self) -> String {
        let ModelConfig { architecture, layers, .. } = self.config;
        let parameters = match self.parameters as f64 {
            n if n >= 1e9 => format!("{:.2} B", n / 1e9),
            n if n >= 1e5 => format!("{:.1} M", n / 1e6),
            n => format!("{n}"),
        };
        let dtype = self.main_type();
        let scales = match self.config.fp8 {
            Some(scales) if dtype == DType::F8_E4M3 => format!(" with {scales}"),
            _ => String::new(),
        };
        format!("{}, {layers} layers, {parameters} parameters, {dtype:?}{scales}", architecture.name())
    }

    fn main_type(&self) -> DType {
        let mut elements: Vec<(DType, usize)> = Vec::new();
        for tensor in self.entries.values().filter_map(Entry::tensor) {
            let count = tensor.rows() * tensor.cols();
            match elements.iter_mut().find(|(dtype, _)| *dtype == tensor.dtype) {
                Some((_, total)) => *total += count,
                None => elements.push((tensor.dtype, count)),
            }
        }
        elements.into_iter().max_by_key(|(_, total)| *total).expect("every model has tensors").0
    }

    /// Checks that all tensors of the family are there as they should be.
    fn assemble(
        origin: &Path,
        config: ModelConfig,
        source: Source,
        entries: Entries,
    ) -> Result<Self, WeightsError> {
        let (mut parameters, mut total_bytes) = (0, 0);
        let mut unused: BTreeMap<&str, ()> = entries.keys().map(|name| (name.as_str(), ())).collect();
        for spec in family::tensors(&config) {
            let Some(entry) = entries.get(&spec.name) else {
                return Err(WeightsError::MissingTensor {
                    path: origin.to_owned(),
                    name: spec.name,
                    expected: spec.shape,
                    architecture: config.architecture.name(),
                });
            };
            if entry.shape() != spec.shape {
                return Err(WeightsError::TensorShape {
                    path: origin.to_owned(),
                    name: spec.name,
                    found: entry.shape().to_vec(),
                    expected: spec.shape,
                });
            }
            let tensor = entry.clone().into_tensor(origin, &spec.name)?;
            parameters += (tensor.rows() * tensor.cols()) as u64;
            total_bytes += (tensor.byte_len() + tensor.scales().map_or(0, Tensor::byte_len)) as u64;
            unused.remove(spec.name.as_str());
        }
        let unused = unused.into_keys().map(str::to_owned).collect();
        Ok(Self {
            origin: origin.to_owned(),
            config,
            source,
            entries,
            unused,
            unused_scales: 0,
            parameters,
            total_bytes,
        })
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checkpoint({}: {})", self.origin.display(), self.description())
    }
}

impl Entry {
    pub(crate) fn shape(&self) -> &[usize] {
        match self {
            Self::Readable(tensor) | Self::Codes(tensor, _) => &tensor.shape,
            Self::Unreadable { shape, .. } => shape,
        }
    }

    /// A range of rows as a matrix. The range must be there.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Self {
        match self {
            Self::Readable(tensor) => Self::Readable(tensor.rows_view(rows)),
            Self::Codes(tensor, problem) => Self::Codes(tensor.rows_view(rows), problem.clone()),
            Self::Unreadable { type_name, shape } => Self::Unreadable {
                type_name: type_name.clone(),
                shape: vec![rows.len(), shape.last().copied().unwrap_or(1)],
            },
        }
    }

    /// The tensor, or an error that names its type.
    pub(crate) fn into_tensor(self, origin: &Path, name: &str) -> Result<Tensor, WeightsError> {
        match self {
            Self::Readable(tensor) => Ok(tensor),
            Self::Codes(tensor, problem) => Err(WeightsError::Fp8 {
                path: origin.to_owned(),
                name: name.to_owned(),
                shape: tensor.shape,
                problem: Box::new(problem),
            }),
            Self::Unreadable { type_name, .. } => Err(WeightsError::TensorType {
                path: origin.to_owned(),
                name: name.to_owned(),
                found: type_name,
            }),
        }
    }

    fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Readable(tensor) => Some(tensor),
            Self::Codes(..) | Self::Unreadable { .. } => None,
        }
    }
}
