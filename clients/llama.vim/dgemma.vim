" llama.vim: in .vimrc, or init.vim, before the plugin is loaded. What to expect: docs/editors.md
let g:llama_config = {
    \ 'endpoint_fim': 'http://127.0.0.1:8080/infill',
    \ 'endpoint_inst': 'http://127.0.0.1:8080/v1/chat/completions',
    \ 'n_prefix': 64,
    \ 'n_suffix': 32,
    \ 'n_predict': 32,
    \ 'ring_n_chunks': 0,
    \ 'auto_fim': v:false,
    \ }
