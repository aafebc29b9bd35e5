//! The command line. Flags follow vLLM and ATOM where those have one; `-` and `_` are the same.

use crate::access::AccessArgs;
use crate::answer_format::{FormatArg, parse_reasoning_format, parse_tool_format};
pub(crate) use crate::choices::{
    ActivationsArg, DTypeArg, Device, DummyType, IsaArg, KvCacheDType, LoadBalanceArg, MoeExchangeArg,
};
use atom_cpu::{Activations, Isa};
use atom_group::{Policy, PolicyError};
use atom_text::{ReasoningFormat, ToolFormat};
use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;

/// A server for large language models.
///
/// `atom serve` fetches a small model at first start and serves it over the OpenAI API:
///
///   atom serve
///   curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \
///     -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
#[derive(Debug, Parser)]
#[command(name = "atom", version, verbatim_doc_comment)]
pub(crate) struct Cli {
    /// What to log: error, warn, info, debug, trace, or a list such as atom_rank=debug,warn.
    #[arg(long, env = "ATOM_LOG", default_value = "info", global = true, value_name = "FILTER")]
    pub(crate) log: String,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a model over HTTP (OpenAI API).
    Serve(ServeArgs),
    /// Talk to a model in the terminal.
    Chat(ChatArgs),
    /// Complete a prompt from the argument or from standard input.
    Generate(GenerateArgs),
    /// Fetch a model into the cache and verify it.
    Pull(PullArgs),
    /// List the models that have a name, and what is in the cache.
    List(SourceArgs),
    /// Say what is in a checkpoint.
    Inspect(InspectArgs),
    /// Measure a running server (any with the OpenAI API), or the step loop of a model in this process.
    Bench(BenchArgs),
    /// Simulate the scheduler and the group protocol: seeded worlds that look for faults, or load.
    Sim(SimArgs),
    /// Settle every step of a step trace again, compare, and draw what the groups did.
    Replay(ReplayArgs),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct SourceArgs {
    /// Never touch the network: only what is in the cache.
    #[arg(long, env = "ATOM_OFFLINE", value_parser = clap::builder::BoolishValueParser::new())]
    pub(crate) offline: bool,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct EngineArgs {
    /// A name (see `atom list`), a hub id (org/name or org/name:FILE.gguf), a folder, or a .gguf file.
    #[arg(long, short, default_value = crate::source::DEFAULT_MODEL)]
    pub(crate) model: String,

    #[command(flatten)]
    pub(crate) source: SourceArgs,

    /// Random weights of this type [bf16 if none is named] in place of the model's own: --model is a folder with
    /// config.json and the tokenizer, and no weights are needed. For measuring a shape; the answers mean nothing.
    #[arg(long, value_enum, value_name = "TYPE", num_args = 0..=1, require_equals = true, default_missing_value = "bf16")]
    pub(crate) load_dummy: Option<DummyType>,

    /// Where to compute. auto takes an NVIDIA GPU if a driver and a GPU are found, else the CPU.
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    pub(crate) device: Device,

    /// GPUs of the ranks by the driver's numbers, one for each rank in order, such as 2,3. One that is named twice is
    /// shared: good for trying a layout out, not for speed [default: 0,1,2 ..].
    #[arg(long, value_name = "I,J,..", value_delimiter = ',')]
    pub(crate) gpus: Vec<usize>,

    /// Ranks that split every layer (-tp N).
    #[arg(long, alias = "tp", value_name = "N", default_value_t = 1)]
    pub(crate) tensor_parallel_size: u16,

    /// Replicas that share the requests (-dp N).
    #[arg(long, alias = "dp", value_name = "N", default_value_t = 1)]
    pub(crate) data_parallel_size: u16,

    /// Attention by data, MLPs or experts over all ranks: -tp N becomes N lanes in lockstep.
    #[arg(long)]
    pub(crate) enable_dp_attention: bool,

    /// Spread whole experts over the ranks, instead of giving every rank a slice of each.
    #[arg(long)]
    pub(crate) enable_expert_parallel: bool,

    /// Hosts that the lanes of -tp N --enable-dp-attention are dealt to, a process on each; every host serves
    /// the requests of its own lanes.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) nodes: usize,

    /// Which of them this is, from 0.
    #[arg(long, value_name = "I", default_value_t = 0)]
    pub(crate) node_rank: usize,

    /// Where host 0 listens for the others, and they find it.
    #[arg(long, value_name = "NAME:PORT")]
    pub(crate) master: Option<String>,

    /// How rows reach the experts of other lanes. gather: all rows to all ranks, sums back. dispatch: rows to
    /// the ranks of their experts, outputs back. auto: dispatch where experts are whole, else gather.
    #[arg(long, value_enum, default_value_t = MoeExchangeArg::Auto)]
    pub(crate) moe_exchange: MoeExchangeArg,

    /// How requests are dealt to lanes. work: by the bucket rows that they are predicted to add, where their
    /// prompt is cached counting less. A request can name its lane (data_parallel_rank), and requests with the
    /// same x-session-id header stay together.
    #[arg(long, value_enum, default_value_t = LoadBalanceArg::Work)]
    pub(crate) dp_load_balance: LoadBalanceArg,

    /// Rows of the largest step; longer prompts are computed in chunks [default: what takes this CPU
    /// less than half a second and fits --workspace-memory; 8192 on a GPU].
    #[arg(long, value_name = "ROWS")]
    pub(crate) max_num_batched_tokens: Option<u32>,

    /// Requests that run at once in a lane.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) max_num_seqs: u32,

    /// Tokens of prompt and answer together [default: what the model was made for].
    #[arg(long, value_name = "TOKENS")]
    pub(crate) max_model_len: Option<usize>,

    /// What a GPU computes in: weights of other types are converted when they are loaded. auto: bfloat16.
    #[arg(long, value_enum, default_value_t = DTypeArg::Auto)]
    pub(crate) dtype: DTypeArg,

    /// Share of a GPU's memory that this process may take, weights and recordings included; what they leave is
    /// the KV cache [default: 0.9].
    #[arg(long, value_name = "SHARE")]
    pub(crate) gpu_memory_utilization: Option<f64>,

    /// How keys and values are kept. auto: on a GPU what it computes in; on a CPU f32 for f32 models, else f16. fp8: a byte
    /// each (e4m3), so half the memory and half the reading; less exact, and nothing is scaled. A GPU takes auto, its own
    /// type and fp8.
    #[arg(long, value_enum, default_value_t = KvCacheDType::Auto)]
    pub(crate) kv_cache_dtype: KvCacheDType,

    /// Memory for all KV caches together, such as 512MiB or 4GiB [default: on a CPU a quarter of the free memory,
    /// 4GiB at most; on a GPU what --gpu-memory-utilization leaves].
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) kv_cache_memory: Option<u64>,

    /// Memory that steps of all ranks may work in at the most, such as 512MiB or 4GiB: activations, scratch and
    /// what goes to other lanes, for the largest step and the worst routing. Without --max-num-batched-tokens
    /// steps are kept as small; with it, more is refused [default: a quarter of the free memory]. A GPU's memory is
    /// planned as a whole: --gpu-memory-utilization.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) workspace_memory: Option<u64>,

    /// Positions in a page of the KV cache: 16, 32, 64 or 128 [default: 16 on a CPU, 64 on a GPU].
    #[arg(long, value_name = "TOKENS")]
    pub(crate) block_size: Option<usize>,

    /// Compute every prompt anew, also what was computed before.
    #[arg(long)]
    pub(crate) no_enable_prefix_caching: bool,

    /// Requests that may wait in a lane; more are refused with 429.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(crate) max_waiting: usize,

    /// Threads of all ranks together, on a CPU [default: one for each core].
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,

    /// Instructions to use [default: the best of this CPU].
    #[arg(long, value_enum)]
    pub(crate) isa: Option<IsaArg>,

    /// Activations that meet quantised weights on a CPU: 16-bit integers (nearly exact), 8-bit ones (as most
    /// engines have it, faster, and flips near-ties between tokens), or f32. With weights of bf16: bf16, which AMX
    /// multiplies, or f32 (any other) [default: bf16 for weights of bf16 with AMX, else int16].
    #[arg(long, value_enum)]
    pub(crate) activations: Option<ActivationsArg>,

    /// Row counts of recordings above max-num-seqs, for example 64,128,256 [default: a dense set].
    #[arg(
        long,
        env = "ATOM_TOKEN_GRAPH_SIZES",
        value_name = "ROWS,ROWS,..",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) token_graph_sizes: String,

    /// Milliseconds that a step may take while somebody decodes, by prediction from measured steps: prompts of
    /// any lane are cut to it, so that nobody's next token waits for them longer. 0 is no bound [default: 50 for
    /// a group of several lanes, no bound for one that is alone].
    #[arg(long, value_name = "MS", value_parser = parse_step_ms)]
    pub(crate) step_ms_max: Option<u32>,

    /// Share of a step that may be padding of its fullest lane; prompts are cut to the edge of a smaller
    /// step rather than padded by more. 0.25 if not set.
    #[arg(long, value_name = "SHARE", value_parser = parse_padding)]
    pub(crate) padding_max: Option<u32>,

    /// Keep no recording: every step makes its own, by the same code. For finding out whether a recording is
    /// at fault.
    #[arg(long)]
    pub(crate) enforce_eager: bool,

    /// Let a step that is no replay of a kept recording end its group with an error that names the cause, in
    /// place of being slower in silence. A guard against causes to come: at present --enforce-eager is the only
    /// one (a size that was not recorded is never taken, the next larger one is), so the two are refused together.
    #[arg(long, conflicts_with = "enforce_eager")]
    pub(crate) fail_on_eager: bool,

    /// Times that a group that lost a rank (an error, a panic, a stuck thread) may form again with a new one;
    /// after that, and at once with 0, the server answers everybody and ends [default: 3, and 0 with --nodes].
    #[arg(long, value_name = "N")]
    pub(crate) rank_restarts_max: Option<u32>,

    /// Fill everything that no result may depend on with NaN, to prove it. Slow; for tests.
    #[arg(long)]
    pub(crate) poison_padding: bool,

    /// The same bits for a request within one layout, whatever runs beside it, in whatever steps. A CPU always computes so;
    /// on a GPU it costs speed, and FP8 weights are expanded (docs/cuda.md).
    #[arg(long)]
    pub(crate) deterministic: bool,

    /// A Jinja file to use instead of the model's own chat template.
    #[arg(long, value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,

    /// Start of the sequence of seeds for requests that bring none [default: from the clock].
    #[arg(long)]
    pub(crate) seed: Option<u64>,

    /// Write what all lanes say and decide in each step to this file, for `atom replay`.
    #[arg(long, value_name = "FILE")]
    pub(crate) step_trace: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) unbuilt: UnbuiltArgs,
}

/// Flags of vLLM and ATOM that are known and not built: refused by name, see [`EngineArgs::refuse_unbuilt`].
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct UnbuiltArgs {
    #[arg(long, hide = true, value_name = "METHOD")]
    quantization: Option<String>,
    #[arg(long, hide = true, value_name = "METHOD")]
    method: Option<String>,
    #[arg(long, hide = true, value_name = "N")]
    num_speculative_tokens: Option<u32>,
}

impl EngineArgs {
    /// A flag that was given and only means something to the CPU backend.
    pub(crate) fn cpu_flag(&self) -> Option<&'static str> {
        let flags = [
            ("--threads", self.threads.is_some()),
            ("--isa", self.isa.is_some()),
            ("--activations", self.activations.is_some()),
            ("--workspace-memory", self.workspace_memory.is_some()),
        ];
        flags.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }

    /// What weights are to be multiplied with on a CPU, if somebody says so.
    pub(crate) fn activations(&self) -> Option<Activations> {
        self.activations.map(|activations| match activations {
            ActivationsArg::Int8 => Activations::Int8,
            ActivationsArg::Int16 => Activations::Int16,
            ActivationsArg::Bf16 => Activations::Bf16,
            ActivationsArg::F32 => Activations::F32,
        })
    }

    /// The instructions that will be used.
    pub(crate) fn isa_used(&self) -> Isa {
        self.isa().unwrap_or_else(Isa::detect)
    }

    /// The instructions that were asked for.
    pub(crate) fn isa(&self) -> Option<Isa> {
        self.isa.map(|isa| match isa {
            IsaArg::Portable => Isa::Portable,
            IsaArg::Avx2 => Isa::Avx2,
            IsaArg::Avx512 => Isa::Avx512,
            IsaArg::Amx => Isa::Amx,
        })
    }

    /// What isn't built is refused and never ignored.
    pub(crate) fn refuse_unbuilt(&self) -> anyhow::Result<()> {
        let flags = [
            ("--quantization", self.unbuilt.quantization.is_some(), "the checkpoint's own format is used"),
            ("--method", self.unbuilt.method.is_some(), "there is no speculation"),
            (
                "--num-speculative-tokens",
                self.unbuilt.num_speculative_tokens.is_some(),
                "there is no speculation",
            ),
        ];
        let asked = flags.into_iter().find(|(_, asked, _)| *asked);
        asked.map_or(Ok(()), |(flag, _, why)| Err(anyhow::anyhow!("{flag} is not built yet: {why}")))
    }
}

#[derive(Args, Debug)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    /// Address to listen on; 0.0.0.0 for all.
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,

    /// Port; 0 takes a free one.
    #[arg(long, alias = "server-port", env = "ATOM_PORT", default_value_t = 8000)]
    pub(crate) port: u16,

    /// What the API calls the model, and further names for it [default: the model's own name].
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub(crate) served_model_name: Vec<String>,

    /// Let whoever reaches the server pause, resume, drain and end it: POST /admin/pause and so on.
    #[arg(long)]
    pub(crate) enable_admin: bool,

    /// Serve no page at / and no stream of steps.
    #[arg(long)]
    pub(crate) no_ui: bool,

    /// How the model writes calls of tools: a format by its name, auto for what its chat template shows, none for
    /// no tools.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = parse_tool_format)]
    pub(crate) tool_call_parser: FormatArg<ToolFormat>,

    /// How the model marks its reasoning: a format by its name, auto for what its chat template shows, none to
    /// leave it in the text.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = parse_reasoning_format)]
    pub(crate) reasoning_parser: FormatArg<ReasoningFormat>,

    /// Let whoever reaches the server look inside: GET /debug/cache_stats.
    #[arg(long)]
    pub(crate) enable_debug: bool,

    /// Let POST /start_profile and /stop_profile record what steps take, into files of this folder for a trace
    /// viewer (Chromium's format, which Perfetto opens). The newest 16 are kept.
    #[arg(long, value_name = "DIR")]
    pub(crate) profile_dir: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) access: AccessArgs,

    /// Seconds that running requests have to finish after SIGTERM or Ctrl-C.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(crate) drain_seconds: u64,
}

/// How answers are sampled.
#[derive(Args, Clone, Debug)]
pub(crate) struct SamplingArgs {
    /// 0 always takes the likeliest token.
    #[arg(long, default_value_t = 0.7)]
    pub(crate) temperature: f32,

    /// Keep the smallest set of tokens with this probability.
    #[arg(long, default_value_t = 0.9)]
    pub(crate) top_p: f32,

    /// Keep the k likeliest tokens; 0 keeps all.
    #[arg(long, default_value_t = 0)]
    pub(crate) top_k: u32,

    /// Tokens to generate at the most [default: what is left of the context].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: Option<u32>,
}

#[derive(Args, Debug)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,

    /// What the model is told first.
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,

    /// Talk to this server and run nothing here: any with the OpenAI API, http://host:port or https://host, with
    /// /v1 or without. --model names one of its models [default: the first that it lists]; sampling that isn't
    /// given is the server's to choose.
    #[arg(long, value_name = "URL")]
    pub(crate) url: Option<String>,

    /// The key that the server of --url asks for [default: OPENAI_API_KEY, if it is set].
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct GenerateArgs {
    /// The text to go on from [default: standard input].
    pub(crate) prompt: Option<String>,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,

    /// Print the speed of prefill and decode on standard error.
    #[arg(long)]
    pub(crate) stats: bool,

    /// Go on past the model's end token.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
}

#[derive(Args, Debug)]
pub(crate) struct PullArgs {
    /// A name (see `atom list`) or a hub id.
    pub(crate) model: String,

    #[command(flatten)]
    pub(crate) source: SourceArgs,
}

#[derive(Args, Debug)]
pub(crate) struct InspectArgs {
    /// As for `atom serve --model`.
    #[arg(default_value = crate::source::DEFAULT_MODEL)]
    pub(crate) model: String,

    #[command(flatten)]
    pub(crate) source: SourceArgs,

    /// List every tensor.
    #[arg(long)]
    pub(crate) tensors: bool,
}

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) what: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Closed-loop load on a server: latency percentiles and tokens per second.
    Serve(Box<atom_bench::ServeBench>),
    Step(Box<crate::step_bench::StepBenchFlags>),
}

#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct SimArgs {
    #[command(subcommand)]
    pub(crate) command: Option<SimCommand>,

    /// Worlds to run: a range such as 0..1000, or one seed.
    #[arg(long, default_value = "0..1000")]
    pub(crate) seeds: String,

    /// Lanes of the simulated group.
    #[arg(long, default_value_t = 4)]
    pub(crate) lanes: usize,

    /// Requests that arrive in each world.
    #[arg(long, default_value_t = 32)]
    pub(crate) requests: usize,

    /// No aborts, preemptions, late or faulty lanes.
    #[arg(long)]
    pub(crate) no_faults: bool,

    /// Write the steps of the world to this file, for `atom replay`; --seeds must be one seed.
    #[arg(long, value_name = "FILE")]
    pub(crate) step_trace: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct ReplayArgs {
    /// What --step-trace wrote.
    pub(crate) file: PathBuf,

    /// Draw a picture into this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,

    /// The first step to show; all are compared.
    #[arg(long, value_name = "STEP", default_value_t = 1)]
    pub(crate) from: u64,

    /// The last step to show [default: the last].
    #[arg(long, value_name = "STEP")]
    pub(crate) to: Option<u64>,
}

#[derive(Subcommand, Debug)]
pub(crate) enum SimCommand {
    /// Requests on virtual lanes: throughput, waiting, padding and alignment of a policy, without a device.
    Load(Box<crate::simulate::LoadFlags>),
    /// Measure steps of ranks on this machine and fit what `load` takes steps to cost.
    Calibrate(Box<crate::simulate::CalibrateFlags>),
}

/// `--max_num_seqs` is `--max-num-seqs`; `-tp N` and `-dp N` are long flags with one dash.
pub(crate) fn normalise(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut literal = false;
    let normal = |arg: OsString| {
        literal |= arg == "--";
        let Some(text) = arg.to_str().filter(|_| !literal) else { return arg };
        let (flag, value) = text.split_once('=').map_or((text, None), |(flag, value)| (flag, Some(value)));
        let flag = match flag {
            "-tp" => "--tp".to_owned(),
            "-dp" => "--dp".to_owned(),
            flag if flag.starts_with("--") => flag.replace('_', "-"),
            flag => flag.to_owned(),
        };
        value.map_or_else(|| flag.clone(), |value| format!("{flag}={value}")).into()
    };
    args.into_iter().map(normal).collect()
}

pub(crate) fn parse_step_ms(text: &str) -> Result<u32, PolicyError> {
    Policy::parse_step_ms(text)
}

/// In thousandths.
pub(crate) fn parse_padding(text: &str) -> Result<u32, PolicyError> {
    Policy::parse_padding(text)
}

/// Bytes from `512MiB`, `4GiB`, `2G` (binary), `1000000`.
fn parse_size(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        other => return Err(format!("'{other}' is no unit; use KiB, MiB or GiB")),
    };
    let value: f64 =
        number.parse().map_err(|_| format!("'{number}' is not a number; for example 512MiB or 4GiB"))?;
    Ok((value * (1u64 << shift) as f64) as u64)
}

#[cfg(test)]
#[path = "args_tests.rs"]
mod tests;
