//! Keys and values as e4m3: against the CPU's cache of the same, against exact ones, and against itself.

use super::common::{Answer, Setup, ask, goldens, request, tiny};
use super::start_in;
use atom_base::SamplingParams;
use atom_cuda::{Element, SumOrder};
use atom_ops::KvDType;

fn scoring() -> SamplingParams {
    SamplingParams { prompt_logprobs: Some(4), logprobs: Some(4), ..SamplingParams::greedy() }
}

fn prompt(tokens: u32) -> Vec<u32> {
    (0..tokens).map(|i| (i * 41 + 3) % 512).collect()
}

/// A middling difference of the log-probabilities of a prompt, and their mean. Where a router is tipped a whole expert is
/// another one, which the first does not see.
fn differences(a: &Answer, b: &Answer) -> (f32, f32) {
    assert!(a.prompt.len() == b.prompt.len() && !a.prompt.is_empty());
    let mut each: Vec<f32> =
        a.prompt.iter().zip(&b.prompt).map(|(a, b)| (a.logprob - b.logprob).abs()).collect();
    each.sort_by(f32::total_cmp);
    (each[each.len() / 2], each.iter().sum::<f32>() / each.len() as f32)
}

/// Both round the same numbers to the same codes, but for those that lie so near the middle of two that f32's last bits
/// decide: one code in some ten thousand. What a systematic difference would be worth is what e4m3 itself is.
pub(crate) fn is_that_of_the_cpu() {
    for name in goldens::MODELS.iter().chain(goldens::MIXTURES) {
        let checkpoint = tiny(name);
        let setup = Setup { kv_dtype: KvDType::E4M3, ..Setup::default() };
        let gpu = start_in(SumOrder::Fastest, &setup, &checkpoint, Element::F32);
        let hosts = [gpu, setup.start(&checkpoint), Setup::default().start(&checkpoint)];
        let [gpu, cpu, exact] = hosts.map(|host| ask(&host, request(&prompt(150), 8, scoring())));
        let ((median, mean), (rounding, _)) = (differences(&gpu, &cpu), differences(&exact, &cpu));
        println!("  {name}: {median:.5} of the CPU's (mean {mean:.5}); e4m3 itself is worth {rounding:.4}");
        assert!(median < rounding / 10.0, "{name}: {median} of {rounding}");
    }
}

/// Poison changes no bit, and with sums in one order the cut into chunks doesn't either: rows read their own keys from the
/// cache too. bf16 stays near.
pub(crate) fn bits_stay_and_bf16_is_near() {
    for name in ["qwen3", "llama_bias", "minimax_m2"] {
        let checkpoint = tiny(name);
        let answer = |order, setup: Setup, element| {
            let host = start_in(order, &setup, &checkpoint, element);
            ask(&host, request(&prompt(83), 24, scoring()))
        };
        let exact = answer(SumOrder::Fastest, Setup::default(), Element::F32);
        let cached = |poison| Setup { poison, kv_dtype: KvDType::E4M3, ..Setup::default() };
        for (order, rows_max) in [(SumOrder::Fixed, 17), (SumOrder::Fastest, 64)] {
            let plain = answer(order, cached(false), Element::BF16);
            let other = answer(order, Setup { rows_max, ..cached(true) }, Element::BF16);
            assert_eq!(plain.bits(), other.bits(), "{name}, {order:?}: poison, steps of {rows_max} rows");
            let (median, mean) = differences(&exact, &plain);
            println!("  {name}, {order:?}: {median:.4} of exact models (mean {mean:.4})");
            // Logits have a standard deviation of about 3, and e4m3 keeps four bits.
            assert!(median < 0.4, "{name}: {median}");
        }
    }
}
