//! Passes the name of the build profile to kvbench, whose report names it.

use std::path::Path;

fn main() {
    // target/[TRIPLE/]PROFILE/build/PACKAGE-HASH/out. The variable PROFILE only says whether a profile
    // inherits from `release`.
    let out = std::env::var("OUT_DIR").unwrap_or_default();
    let directory = Path::new(&out).ancestors().nth(3);
    let name = directory.and_then(Path::file_name);
    let name = name.map_or("unknown".into(), |name| name.to_string_lossy());
    // The profile `dev` builds into the directory `debug`.
    let profile = if name == "debug" { "dev" } else { &*name };
    println!("cargo::rustc-env=KVPOOL_PROFILE={profile}");
    println!("cargo::rerun-if-changed=build.rs");
}
