# shellcheck shell=bash
# Shared by the example scripts that train here; source it from the repository's root.

# train_and_plot CONFIG_NAME [key=value|option]...: run a training, then print table and curve and write the picture
train_and_plot() {
    local config=$1 argument parent=outputs
    shift
    python cli/train_grpo.py --config-name "$config" "$@"
    for argument in "$@"; do
        case $argument in
            --dry-run | --cfg | --cfg=* | -h | --help) return 0 ;; # nothing was trained
            output_dir=*) parent=${argument#output_dir=} ;;
        esac
    done
    # the trainer points `latest` at the folder of the run
    python -m mindspeed_rl.metrics.curve "$(cd "$parent/latest" && pwd -P)"
}
