//! The words that prompts are made of.

/// Short everyday words: most tokenizers spend one or two tokens on each. 256, so that one random
/// byte picks one.
pub(crate) const WORDS: [&str; 256] = [
    "acorn", "actor", "after", "again", "agent", "album", "alert", "alone", "amber", "angle", "apple",
    "arrow", "atlas", "autumn", "axis", "badge", "baker", "basin", "beach", "bell", "bench", "berry", "bird",
    "black", "blade", "blank", "bloom", "board", "boat", "bone", "book", "border", "bottle", "branch",
    "brass", "bread", "brick", "bridge", "brief", "bright", "broad", "brook", "brown", "brush", "bucket",
    "bundle", "butter", "button", "cabin", "cable", "camp", "candle", "canvas", "carbon", "card", "carpet",
    "castle", "cedar", "chain", "chair", "chalk", "charm", "cherry", "chief", "circle", "clay", "clean",
    "cliff", "clock", "cloth", "cloud", "coach", "coast", "coin", "color", "copper", "coral", "corner",
    "cotton", "cradle", "craft", "crane", "cream", "crew", "crop", "crown", "crystal", "cup", "current",
    "curve", "dance", "dawn", "deck", "delta", "desert", "desk", "diamond", "dinner", "doctor", "door",
    "double", "dragon", "drawer", "dream", "drift", "drum", "dust", "eagle", "early", "earth", "east",
    "edge", "eight", "engine", "evening", "fabric", "factor", "falcon", "family", "farm", "fence", "fern",
    "field", "finger", "fire", "fish", "flag", "flame", "flat", "flint", "floor", "flour", "flower", "fog",
    "forest", "forge", "fork", "fossil", "fox", "frame", "fresh", "front", "frost", "fruit", "garden",
    "gate", "gentle", "giant", "glass", "globe", "glove", "gold", "grain", "grand", "granite", "grape",
    "grass", "gravel", "green", "grove", "guide", "guitar", "hammer", "harbor", "harvest", "hawk", "heart",
    "hill", "hollow", "honey", "horn", "horse", "hotel", "house", "ice", "island", "ivory", "jacket",
    "jewel", "jungle", "kettle", "key", "kitchen", "ladder", "lake", "lamp", "lantern", "leaf", "leather",
    "lemon", "letter", "library", "light", "lily", "linen", "lion", "little", "lock", "long", "lunar",
    "machine", "magnet", "maple", "marble", "market", "meadow", "metal", "middle", "mill", "mirror", "model",
    "moon", "morning", "mountain", "music", "narrow", "needle", "nest", "night", "north", "oak", "ocean",
    "olive", "onion", "orange", "orbit", "orchard", "oven", "owl", "oyster", "page", "paint", "palace",
    "panel", "paper", "parade", "path", "pearl", "pebble", "pencil", "pepper", "piano", "pilot", "pine",
    "planet", "plate", "pocket", "poem", "pond", "powder", "prairie", "quiet", "rabbit", "rain", "river",
    "stone",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_word_is_there_twice() {
        let distinct: std::collections::BTreeSet<_> = WORDS.iter().collect();
        assert_eq!(distinct.len(), WORDS.len());
    }
}
