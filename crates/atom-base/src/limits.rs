//! Every bound of the program that is not a user's flag, with the reason beside it.

/// Ranks in one mesh. Rank threads of one host; beyond this the exchange's linear scan would show.
pub const RANKS_MAX: usize = 64;

/// Lanes of one group. Every lane reads everybody's 48 bytes in a step: at this many that is 48 KiB, which a
/// core's nearest caches hold.
pub const LANES_MAX: usize = 1024;

/// Bytes of one HTTP request body. 32 MiB holds a prompt of several million tokens as JSON ids.
pub const BODY_BYTES_MAX: usize = 32 << 20;

/// Bytes of the bodies of all requests that are being read: 32 of the largest, or ten thousand of 100 kB.
pub const BODIES_BYTES_MAX: usize = 1 << 30;

/// Alternatives that `top_logprobs` may ask for, as in the OpenAI API.
pub const TOP_LOGPROBS_MAX: usize = 20;

/// Choices (`n`) of one request, as in the OpenAI API.
pub const CHOICES_MAX: u32 = 128;

/// Prompts in one `/v1/completions` request.
pub const PROMPTS_MAX: usize = 2048;

/// Stop strings of one request. OpenAI allows 4; agents send more.
pub const STOP_STRINGS_MAX: usize = 16;

/// Bytes of one stop string: text is held back by at most this much.
pub const STOP_STRING_BYTES_MAX: usize = 1024;

/// The smallest repetition penalty. Logits are divided by it: far below, they would be infinite, and no numbers after
/// the next subtraction.
pub const REPETITION_PENALTY_MIN: f32 = 0.01;

/// Entries of `logit_bias`.
pub const LOGIT_BIAS_MAX: usize = 1024;

/// Stop token ids of one request.
pub const STOP_TOKENS_MAX: usize = 64;

/// Tools of one request. OpenAI allows 128; an agent with several servers of tools brings some hundred.
pub const TOOLS_MAX: usize = 512;

/// Bytes of one tool's name, as in the OpenAI API.
pub const TOOL_NAME_BYTES_MAX: usize = 64;

/// Bytes of all names, descriptions and schemas of a request: half a million tokens, more than contexts hold.
pub const TOOLS_BYTES_MAX: usize = 2 << 20;
/// Bytes of one request's head: request line and headers together. Agents behind gateways send some 4 KiB; nginx
/// takes 32 KiB in all.
pub const HEAD_BYTES_MAX: usize = 64 << 10;

/// Headers of one request. Clients behind several proxies send some 40.
pub const HEADERS_MAX: usize = 100;

/// Bytes of one request's URI. No path of ours has parameters; what browsers and proxies take is 8 KiB.
pub const URI_BYTES_MAX: usize = 8 << 10;

/// Keys that a server can know. Each costs a comparison per request.
pub const API_KEYS_MAX: usize = 1024;

/// Bytes of one API key. Those of the large providers have up to 200.
pub const API_KEY_BYTES_MAX: usize = 512;
